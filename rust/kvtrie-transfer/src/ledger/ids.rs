//! Token ids as engines report them: final ones, then placeholders.

use kvtrie_core::Result;

use crate::error::invalid;

/// Stands for a sampled token whose id is not known yet.
pub const PLACEHOLDER: i64 = -1;

/// The final ids of a list. Placeholders may only be at the end.
pub(super) fn finals<T: Copy + Into<i64>>(ids: &[T]) -> std::result::Result<&[T], String> {
    let unknown = ids
        .iter()
        .rev()
        .take_while(|&&id| id.into() == PLACEHOLDER)
        .count();
    let finals = &ids[..ids.len() - unknown];
    match finals
        .iter()
        .position(|&id| u32::try_from(id.into()).is_err())
    {
        None => Ok(finals),
        Some(at) => Err(wrong(finals[at].into(), at, finals.len())),
    }
}

#[cold]
fn wrong(id: i64, at: usize, len: usize) -> String {
    if id == PLACEHOLDER {
        return format!(
            "ids[{at}] is a placeholder (-1), but a final id follows it at {}",
            len - 1
        );
    }
    format!("ids[{at}] is {id}; it must be in [0, {})", 1_u64 << 32)
}

pub(super) fn tokens<T: Copy + Into<i64>>(ids: &[T], into: &mut Vec<u32>) {
    into.clear();
    // `finals` has checked that every id fits.
    into.extend(ids.iter().filter_map(|&id| u32::try_from(id.into()).ok()));
}

pub(super) fn checked<T: Copy + Into<i64>>(ids: &[T], call: &'static str) -> Result<Vec<u32>> {
    let finals = finals(ids).map_err(|why| invalid!(call, "{why}"))?;
    let mut out = Vec::with_capacity(finals.len());
    tokens(finals, &mut out);
    Ok(out)
}
