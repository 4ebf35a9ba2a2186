//! Writes KV events as engines do.

#![allow(dead_code, reason = "not every test writes every event")]

use rmp::encode::{
    ByteBuf, write_array_len, write_bin, write_f64, write_map_len, write_nil, write_str, write_uint,
};

pub(crate) const SIZE: usize = 2;

/// One value of an event.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Nil,
    Int(u64),
    Text(&'static str),
    Bytes(Vec<u8>),
    List(Vec<Value>),
}

pub(crate) fn ints(of: impl IntoIterator<Item = u64>) -> Value {
    Value::List(of.into_iter().map(Value::Int).collect())
}

fn write(into: &mut ByteBuf, value: &Value) {
    match value {
        Value::Nil => write_nil(into).unwrap(),
        Value::Int(number) => {
            write_uint(into, *number).unwrap();
        }
        Value::Text(text) => write_str(into, text).unwrap(),
        Value::Bytes(bytes) => write_bin(into, bytes).unwrap(),
        Value::List(values) => {
            write_array_len(into, u32::try_from(values.len()).unwrap()).unwrap();
            for value in values {
                write(into, value);
            }
        }
    }
}

pub(crate) type Event = Vec<(&'static str, Value)>;

pub(crate) fn stored(
    hashes: &[u64],
    parent: Option<u64>,
    tokens: &[u32],
    medium: &'static str,
) -> Event {
    vec![
        ("type", Value::Text("BlockStored")),
        ("block_hashes", ints(hashes.iter().copied())),
        ("parent_block_hash", parent.map_or(Value::Nil, Value::Int)),
        ("token_ids", ints(tokens.iter().map(|&token| token.into()))),
        ("block_size", Value::Int(SIZE as u64)),
        ("lora_id", Value::Nil),
        ("medium", Value::Text(medium)),
    ]
}

pub(crate) fn removed(hashes: &[u64], medium: &'static str) -> Event {
    vec![
        ("type", Value::Text("BlockRemoved")),
        ("block_hashes", ints(hashes.iter().copied())),
        ("medium", Value::Text(medium)),
    ]
}

pub(crate) fn cleared() -> Event {
    vec![("type", Value::Text("AllBlocksCleared"))]
}

/// A batch of events as maps, or as arrays of their values.
pub(crate) fn batch(events: &[Event], as_maps: bool, rank: Option<u64>) -> Vec<u8> {
    let mut out = ByteBuf::new();
    let into = &mut out;
    write_array_len(into, if rank.is_some() { 3 } else { 2 }).unwrap();
    write_f64(into, 1.5).unwrap();
    write_array_len(into, u32::try_from(events.len()).unwrap()).unwrap();
    for event in events {
        let len = u32::try_from(event.len()).unwrap();
        if as_maps {
            write_map_len(into, len).unwrap();
        } else {
            write_array_len(into, len).unwrap();
        }
        for (name, value) in event {
            if as_maps {
                write_str(into, name).unwrap();
            }
            write(into, value);
        }
    }
    if let Some(rank) = rank {
        write_uint(into, rank).unwrap();
    }
    out.into_vec()
}
