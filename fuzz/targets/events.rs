//! KV events of a worker that contradict themselves, or are not events at all.

#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    kvtrie_fuzz::events::run(data);
});

#[cfg(not(fuzzing))]
fn main() -> std::io::Result<()> {
    kvtrie_fuzz::replay(|data| {
        kvtrie_fuzz::events::run(data);
    })
}
