//! KV events of a worker that says anything, next to one that tells the truth.
//!
//! The harness writes batches of events as engines do, with hashes, parents and tokens from a few values, so that they
//! contradict each other; or changes the bytes of such a batch. After each batch the index is whole, within its
//! limits, and gives the honest worker what it has. The other worker gets no token that its events have not said.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvtrie_cluster::{
    FindOptions, IndexerConfig, KvIndexer, OverlapScores, Stream, WorkerId, WorkerStats,
};
use kvtrie_core::{Namespace, Salt, TokenSequence};
use rmp::encode::{ByteBuf, write_array_len, write_f64, write_nil, write_str, write_uint};

use crate::bytes::Bytes;

const SIZE: usize = 2;
const LIMIT: usize = 24;
const PARKED: usize = 3;
const MEDIA: [&str; 4] = ["GPU", "CPU", "DISK", "EXTERNAL"];
const HASHES: usize = 12;
/// Tokens that the honest worker has.
const TRUE_TOKENS: usize = 12;

/// How many batches of an input were applied, and how many were refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// All of their events were read.
    pub applied: u32,
    /// They changed nothing.
    pub refused: u32,
}

/// A block as an event names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    parent: Option<u64>,
    hash: u64,
    tokens: [u32; SIZE],
}

enum Said {
    Stored(Vec<Claim>, usize),
    Removed(Vec<u64>, usize),
    Cleared,
}

/// Runs one input.
///
/// # Panics
/// When a rule is broken.
pub fn run(data: &[u8]) -> Outcome {
    let mut bytes = Bytes::new(data);
    let config = IndexerConfig {
        max_blocks: LIMIT,
        max_parked: PARKED,
        max_batch_bytes: 4_096,
        ..IndexerConfig::new(SIZE)
    };
    let mut index = KvIndexer::new(config, &[3; 16]).expect("a valid index");
    let honest = index.add_worker(space()).expect("room for a worker");
    let hostile = index.add_worker(space()).expect("room for a worker");
    let truth = true_blocks();
    apply(&mut index, honest, &written(&[truth])).expect("true events");
    // Bytes of any kind may say anything; of written events it is known what they say.
    let mut claims = Some(BTreeSet::new());
    let mut outcome = Outcome::default();
    while !bytes.is_empty() {
        let said: Vec<Said> = (0..=bytes.below(3)).map(|_| event(&mut bytes)).collect();
        let mut raw = written(&said);
        if bytes.one_in(4) {
            changed(&mut bytes, &mut raw);
            claims = None;
        }
        for one in &said {
            match (one, &mut claims) {
                (Said::Stored(blocks, _), Some(known)) => known.extend(blocks.iter().copied()),
                (Said::Cleared, Some(known)) => known.clear(),
                _ => {}
            }
        }
        let before = (figures(&index, hostile), ask(&index));
        match apply(&mut index, hostile, &raw) {
            Ok(()) => outcome.applied += 1,
            Err(message) => {
                assert!(claims.is_none(), "events as engines write them: {message}");
                let after = (figures(&index, hostile), ask(&index));
                assert_eq!(
                    before, after,
                    "a refused batch changed something: {message}"
                );
                outcome.refused += 1;
            }
        }
        check(&index, honest, hostile, claims.as_ref());
    }
    outcome
}

/// What holds after every batch.
fn check(index: &KvIndexer, honest: WorkerId, hostile: WorkerId, claims: Option<&BTreeSet<Claim>>) {
    index.check().expect("a whole index");
    let limits = figures(index, hostile);
    assert!(limits.blocks <= LIMIT as u64, "{limits:?}");
    assert!(limits.entries <= LIMIT as u64, "{limits:?}");
    assert!(limits.parked <= PARKED as u64, "{limits:?}");
    assert_eq!(figures(index, honest).entries, (TRUE_TOKENS / SIZE) as u64);
    let scores = ask(index);
    assert_eq!(
        scores.exact[0] as usize, TRUE_TOKENS,
        "of the honest worker"
    );
    assert!(!scores.uncertain[0], "the honest worker is uncertain");
    if let Some(claims) = claims {
        let most = said_of(claims);
        let got = scores.exact[1] as usize;
        assert!(got <= most, "{got} tokens; its events speak of {most}");
    }
}

/// The most tokens of the prompt that some chain of claims spells from the front.
fn said_of(claims: &BTreeSet<Claim>) -> usize {
    let mut ends = BTreeSet::from([None]);
    for (at, block) in prompt().chunks(SIZE).enumerate() {
        ends = claims
            .iter()
            .filter(|claim| ends.contains(&claim.parent) && claim.tokens == block)
            .map(|claim| Some(claim.hash))
            .collect();
        if ends.is_empty() {
            return at * SIZE;
        }
    }
    prompt().len()
}

fn prompt() -> Vec<u32> {
    (0..TRUE_TOKENS as u32).map(|token| token % 4).collect()
}

fn true_blocks() -> Said {
    let blocks = prompt();
    let blocks = blocks
        .chunks(SIZE)
        .zip(1_u64..)
        .map(|(tokens, hash)| Claim {
            parent: (hash > 1).then_some(hash - 1),
            hash,
            tokens: [tokens[0], tokens[1]],
        });
    Said::Stored(blocks.collect(), 0)
}

fn event(bytes: &mut Bytes<'_>) -> Said {
    let hash = |bytes: &mut Bytes<'_>| 1 + bytes.below(HASHES) as u64;
    let tier = if bytes.one_in(4) { bytes.below(4) } else { 0 };
    match bytes.below(8) {
        7 => Said::Cleared,
        5 | 6 => Said::Removed((0..=bytes.below(3)).map(|_| hash(bytes)).collect(), tier),
        _ => {
            let mut parent = bytes.one_in(2).then(|| hash(bytes));
            let blocks = (0..=bytes.below(4)).map(|_| {
                let block = Claim {
                    parent,
                    hash: hash(bytes),
                    tokens: [bytes.below(4) as u32, bytes.below(4) as u32],
                };
                parent = Some(block.hash);
                block
            });
            Said::Stored(blocks.collect(), tier)
        }
    }
}

/// A batch in vLLM's array form.
fn written(events: &[Said]) -> Vec<u8> {
    let mut out = ByteBuf::new();
    array(&mut out, 2);
    write_f64(&mut out, 1.5).expect("memory");
    array(&mut out, events.len());
    for event in events {
        match event {
            Said::Stored(blocks, tier) => {
                array(&mut out, 7);
                text(&mut out, "BlockStored");
                numbers(&mut out, blocks.iter().map(|block| block.hash));
                match blocks[0].parent {
                    None => write_nil(&mut out).expect("memory"),
                    Some(parent) => number(&mut out, parent),
                }
                let tokens = blocks.iter().flat_map(|block| block.tokens);
                numbers(&mut out, tokens.map(u64::from));
                number(&mut out, SIZE as u64);
                write_nil(&mut out).expect("memory");
                text(&mut out, MEDIA[*tier]);
            }
            Said::Removed(hashes, tier) => {
                array(&mut out, 3);
                text(&mut out, "BlockRemoved");
                numbers(&mut out, hashes.iter().copied());
                text(&mut out, MEDIA[*tier]);
            }
            Said::Cleared => {
                array(&mut out, 1);
                text(&mut out, "AllBlocksCleared");
            }
        }
    }
    out.into_vec()
}

fn array(out: &mut ByteBuf, len: usize) {
    write_array_len(out, u32::try_from(len).expect("a short list")).expect("memory");
}

fn text(out: &mut ByteBuf, text: &str) {
    write_str(out, text).expect("memory");
}

fn number(out: &mut ByteBuf, number: u64) {
    write_uint(out, number).expect("memory");
}

fn numbers(out: &mut ByteBuf, of: impl Iterator<Item = u64>) {
    let all: Vec<u64> = of.collect();
    array(out, all.len());
    for one in all {
        number(out, one);
    }
}

/// Bytes with some of them changed, cut out or doubled, or a length that is a lie.
fn changed(bytes: &mut Bytes<'_>, raw: &mut Vec<u8>) {
    for _ in 0..=bytes.below(4) {
        if raw.is_empty() {
            return;
        }
        bytes.disturb(raw);
    }
}

fn space() -> Arc<Namespace> {
    let namespace = Namespace::new("m", "auto", "default", None, Salt::Shared);
    Arc::new(namespace.expect("a valid namespace"))
}

fn apply(index: &mut KvIndexer, worker: WorkerId, raw: &[u8]) -> Result<(), String> {
    let batch = index
        .reader()
        .read(raw)
        .map_err(|error| error.to_string())?;
    let applied = index.apply(worker, Stream::Engine, &batch);
    applied.map(drop).map_err(|error| error.to_string())
}

fn figures(index: &KvIndexer, worker: WorkerId) -> WorkerStats {
    index.worker_stats(worker).expect("a live worker")
}

fn ask(index: &KvIndexer) -> OverlapScores {
    let seq = TokenSequence::new(space(), prompt(), Vec::new()).expect("a valid sequence");
    let options = FindOptions {
        keep_last: 0,
        moved: false,
        ..FindOptions::default()
    };
    let asked = index.prompt(&seq, false);
    index.find(&asked, options).expect("a prompt of this index")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::random_inputs;

    #[test]
    fn random_inputs_break_no_rule() {
        let mut sum = Outcome::default();
        for data in random_inputs() {
            let one = run(&data);
            sum.applied += one.applied;
            sum.refused += one.refused;
        }
        assert!(sum.applied > 5_000 && sum.refused > 400, "{sum:?}");
    }

    #[test]
    fn claims_bound_what_a_worker_gets() {
        let Said::Stored(blocks, _) = true_blocks() else {
            unreachable!("they are stored");
        };
        let claims: BTreeSet<Claim> = blocks.iter().copied().collect();
        assert_eq!(said_of(&claims), TRUE_TOKENS);
        let without = claims.iter().copied().filter(|one| one.hash != 3).collect();
        assert_eq!(said_of(&without), 2 * SIZE);
        assert_eq!(said_of(&BTreeSet::new()), 0);
    }
}
