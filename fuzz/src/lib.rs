//! Fuzz harnesses: each is a function from bytes to a run that panics when a rule is broken.
//!
//! Built with `--cfg fuzzing` (`make fuzz`) the targets are driven by libFuzzer. Built without, each
//! replays the files that it is given, such as an input that libFuzzer found.

pub mod bytes;
pub mod engine;
pub mod events;
pub mod restore;
pub mod transfer;

/// Runs a harness on each file named on the command line.
///
/// # Errors
/// When a file cannot be read.
pub fn replay(harness: impl Fn(&[u8])) -> std::io::Result<()> {
    for path in std::env::args_os().skip(1) {
        harness(&std::fs::read(path)?);
    }
    Ok(())
}
