//! What this machine allows: memory compared and copied, loads from a large table, heap blocks.
//!
//! `limits [--json] [--quick]`
//!
//! *Warm*: the same memory repeatedly. *Cold*: at random in a gibibyte, compared with or copied into a small warm
//! buffer, as a request's tokens are compared with those of the index.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use kvtrie_benches::{Random, Row, flag, quantile};

/// What is compared and copied: the token ids of 512, 8,192 and 102,400 tokens.
const SIZES: [(usize, &str); 3] = [(512, "2 KB"), (8_192, "32 KB"), (102_400, "400 KB")];

/// Runs of which every figure is the median.
const RUNS: usize = 31;

struct Scale {
    /// Bytes of the buffer that is larger than the caches.
    buffer: usize,
    /// Bytes of the table that single loads go to.
    table: usize,
    /// Bytes that one run compares or copies.
    run: usize,
    /// Loads of one run.
    loads: usize,
}

/// Runs `work`, which makes a number of calls, and returns a row with the time of one.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn measure(name: &str, unit: &'static str, calls: usize, mut work: impl FnMut()) -> Row {
    work();
    let mut times: Vec<u64> = (0..RUNS)
        .map(|_| {
            let begun = Instant::now();
            work();
            u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
        })
        .collect();
    times.sort_unstable();
    let per = if unit == "us" { 1000.0 } else { 1.0 };
    let at = |share| quantile(&times, share) as f64 / calls as f64 / per;
    Row::new(name, unit)
        .with("median", at(0.5))
        .with("p10", at(0.1))
        .with("p90", at(0.9))
}

fn compare_and_copy(
    scale: &Scale,
    report: &mut impl FnMut(Row) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    // All bytes have the same value, so any two places of the buffer are equal, but at different addresses.
    let large = vec![7u32; scale.buffer / 4];
    let mut random = Random::new(1);
    for (len, name) in SIZES {
        let calls = (scale.run / (len * 4)).max(1);
        let warm = large[..len].to_vec();
        let mut small = warm.clone();
        report(measure(
            &format!("compare {name}, warm"),
            "us",
            calls,
            || {
                for _ in 0..calls {
                    assert!(black_box(&small[..]) == black_box(&warm[..]));
                }
            },
        ))?;
        let mut at = || {
            // On a cache line, as large allocations are.
            let from =
                usize::try_from(random.below(((large.len() - len) / 16) as u64)).unwrap_or(0);
            from * 16
        };
        report(measure(
            &format!("compare {name}, cold"),
            "us",
            calls,
            || {
                for _ in 0..calls {
                    let from = at();
                    assert!(black_box(&small[..]) == black_box(&large[from..from + len]));
                }
            },
        ))?;
        report(measure(&format!("copy {name}, warm"), "us", calls, || {
            for _ in 0..calls {
                black_box(&mut small[..]).copy_from_slice(black_box(&warm[..]));
            }
        }))?;
        report(measure(&format!("copy {name}, cold"), "us", calls, || {
            for _ in 0..calls {
                let from = at();
                black_box(&mut small[..]).copy_from_slice(black_box(&large[from..from + len]));
            }
        }))?;
    }
    Ok(())
}

fn loads(
    scale: &Scale,
    report: &mut impl FnMut(Row) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    // A full cycle through a table whose length is a power of two: x → a · x + c with a ≡ 5 (mod 8) and an odd c.
    let len = scale.table / 4;
    let mask = u32::try_from(len - 1)?;
    let next = |at: u32| at.wrapping_mul(1_664_525).wrapping_add(1_013_904_223) & mask;
    let table: Vec<u32> = (0..=mask).map(next).collect();
    let mut at = 0;
    report(measure(
        "one of many dependent loads",
        "ns",
        scale.loads,
        || {
            for _ in 0..scale.loads {
                at = table[at as usize];
            }
            black_box(at);
        },
    ))?;
    let mut from = 0;
    report(measure(
        "one of many independent loads",
        "ns",
        scale.loads,
        || {
            let mut sum = 0u32;
            for _ in 0..scale.loads {
                from = next(from);
                sum = sum.wrapping_add(table[from as usize]);
            }
            black_box(sum);
        },
    ))
}

fn heap(
    scale: &Scale,
    report: &mut impl FnMut(Row) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    for (len, name) in SIZES {
        report(measure(
            &format!("allocate and free {name}"),
            "ns",
            scale.loads,
            || {
                for _ in 0..scale.loads {
                    drop(black_box(Vec::<u32>::with_capacity(black_box(len))));
                }
            },
        ))?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let json = flag("--json");
    let scale = if flag("--quick") {
        Scale {
            buffer: 64 << 20,
            table: 32 << 20,
            run: 1 << 20,
            loads: 1_000,
        }
    } else {
        Scale {
            buffer: 1 << 30,
            table: 512 << 20,
            run: 8 << 20,
            loads: 200_000,
        }
    };
    let mut first = true;
    let mut report = |row: Row| -> Result<(), Box<dyn Error>> {
        if first && !json {
            row.print_head()?;
        }
        first = false;
        Ok(row.print(json)?)
    };
    compare_and_copy(&scale, &mut report)?;
    loads(&scale, &mut report)?;
    heap(&scale, &mut report)
}
