//! The kept corpus: it breaks no rule, and some input of each target finds a planted bug in the core.

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

/// The largest corpus of a target.
const MOST_BYTES: u64 = 256 * 1024;

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("seeds")
        .join(target);
    let mut files: Vec<_> = fs::read_dir(folder)
        .expect("a folder of seeds")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    files
        .iter()
        .map(|path| fs::read(path).expect("a seed"))
        .collect()
}

/// Runs the seeds of a target, and returns the number of those that break a rule.
fn broken(target: &str, run: fn(&[u8])) -> usize {
    let seeds = seeds(target);
    let bytes: u64 = seeds.iter().map(|seed| seed.len() as u64).sum();
    assert!(seeds.len() >= 50, "{} seeds of {target}", seeds.len());
    assert!(bytes <= MOST_BYTES, "{bytes} bytes of seeds of {target}");
    let fails = |seed: &&Vec<u8>| catch_unwind(|| run(seed)).is_err();
    seeds.iter().filter(fails).count()
}

fn check(target: &str, run: fn(&[u8])) {
    let broken = broken(target, run);
    if cfg!(feature = "canary") {
        assert!(broken > 0, "no seed of {target} finds the bug on purpose");
    } else {
        assert_eq!(broken, 0, "seeds of {target} break a rule");
    }
}

#[test]
fn seeds_of_engine() {
    check("engine", |seed| {
        kvtrie_fuzz::engine::run(seed);
    });
}

#[test]
fn seeds_of_events() {
    check("events", |seed| {
        kvtrie_fuzz::events::run(seed);
    });
}

#[test]
fn seeds_of_restore() {
    check("restore", |seed| {
        kvtrie_fuzz::restore::run(seed);
    });
}

#[test]
fn seeds_of_transfer() {
    check("transfer", |seed| {
        kvtrie_fuzz::transfer::run(seed);
    });
}
