//! Transfer manifests that are arbitrary bytes, or true ones that were changed.

#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    kvtrie_fuzz::transfer::run(data);
});

#[cfg(not(fuzzing))]
fn main() -> std::io::Result<()> {
    kvtrie_fuzz::replay(|data| {
        kvtrie_fuzz::transfer::run(data);
    })
}
