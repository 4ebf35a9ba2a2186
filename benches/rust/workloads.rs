//! Conversations that `make workloads` has written.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvtrie_core::{Config, Error, RadixIndex, TokenSequence};

use crate::{BLOCK_SIZE, Ids, SPARE_BLOCKS, add, namespace};

const MAGIC: u32 = u32::from_le_bytes(*b"KVTW");
const VERSION: u32 = 1;

/// One conversation before its next turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// The turn before: its prompt and the ids that were generated.
    pub cached: Vec<u32>,
    /// How many of these have KV.
    pub num_computed: usize,
    /// What the client sends next.
    pub prompt: Vec<u32>,
}

/// Where `make workloads` writes a file.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    root.join("target")
        .join("workloads")
        .join(format!("{name}.bin"))
}

/// The conversations of a file.
///
/// # Errors
/// If there is no such file, or it has another format.
pub fn read(path: &Path) -> io::Result<Vec<Conversation>> {
    let bytes = fs::read(path)?;
    let words = bytes.chunks_exact(4).map(|word| {
        let word: [u8; 4] = word.try_into().unwrap_or_default();
        u32::from_le_bytes(word)
    });
    let words: Vec<u32> = words.collect();
    parsed(&words).ok_or_else(|| {
        let text = format!("{} holds no conversations", path.display());
        io::Error::new(ErrorKind::InvalidData, text)
    })
}

fn parsed(words: &[u32]) -> Option<Vec<Conversation>> {
    let [MAGIC, VERSION, count, rest @ ..] = words else {
        return None;
    };
    let mut rest = rest;
    let mut conversations = Vec::new();
    for _ in 0..*count {
        let [cached, computed, prompt, tokens @ ..] = rest else {
            return None;
        };
        let (cached, tokens) = tokens.split_at_checked(*cached as usize)?;
        let (prompt, tokens) = tokens.split_at_checked(*prompt as usize)?;
        conversations.push(Conversation {
            cached: cached.to_vec(),
            num_computed: *computed as usize,
            prompt: prompt.to_vec(),
        });
        rest = tokens;
    }
    rest.is_empty().then_some(conversations)
}

/// An index that holds the whole blocks of all conversations and keeps fingerprints of windows.
///
/// # Errors
/// If the pool would pass 2³¹ blocks.
///
/// # Panics
/// If two conversations begin with the same block.
pub fn cached(conversations: &[Conversation]) -> Result<RadixIndex, Error> {
    let blocks = conversations
        .iter()
        .map(|each| each.num_computed / BLOCK_SIZE);
    let num_blocks = blocks.clone().sum::<usize>() as u64 + SPARE_BLOCKS;
    let mut index = RadixIndex::new(Config {
        num_blocks,
        block_size: BLOCK_SIZE,
        moved_runs: true,
        ..Config::seeded(0)
    })?;
    let mut next = Ids::default();
    let namespace = namespace()?;
    for (each, blocks) in conversations.iter().zip(blocks) {
        let tokens = each.cached[..blocks * BLOCK_SIZE].to_vec();
        let mut seq = TokenSequence::new(Arc::clone(&namespace), tokens, Vec::new())?;
        add(&mut index, &mut seq, 0, &next.take(blocks))?;
    }
    Ok(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsed_conversations_are_those_written() {
        let words = [MAGIC, VERSION, 2, 3, 2, 1, 7, 8, 9, 5, 0, 0, 2, 4, 4];
        let conversations = parsed(&words).unwrap();
        let first = Conversation {
            cached: vec![7, 8, 9],
            num_computed: 2,
            prompt: vec![5],
        };
        assert_eq!(conversations[0], first);
        assert_eq!(conversations[1].prompt, [4, 4]);
    }

    #[test]
    fn parsed_refuses_what_is_cut_short_or_too_long() {
        let words = [MAGIC, VERSION, 1, 1, 0, 2, 7, 8, 9];
        assert!(parsed(&words).is_some());
        for end in 0..words.len() {
            assert_eq!(parsed(&words[..end]), None, "{end} words");
        }
        let longer = [&words[..], &[0]].concat();
        assert_eq!(parsed(&longer), None);
        assert_eq!(parsed(&[MAGIC, 2, 0]), None);
        assert_eq!(parsed(&[MAGIC, VERSION, 1, u32::MAX, 0, 0]), None);
    }
}
