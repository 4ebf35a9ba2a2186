//! Reads and writes the policy that the approximate KV of a manifest was built under: nil if it is not known, or at
//! most 90 bytes. The kinds that it forbids are left out, because a manifest has no tags; without them a policy is
//! laxer, which is never wrong (rule P19 in `docs/design.md`).

use kvtrie_core::{Repair, ReusePolicy, Scope};

use crate::transfer::wire::{ByteReader, ByteWriter, READ, Read};

const FIELDS: usize = 11;

/// The shortest run that a policy may ask for.
pub(super) const LEAST_RUN: usize = 8;

pub(super) fn write(out: &mut ByteWriter, policy: Option<&ReusePolicy>) {
    let Some(policy) = policy else {
        return out.nil();
    };
    out.array(FIELDS);
    out.optional(policy.min_run);
    out.uint(policy.max_hops.into());
    out.share(policy.max_approximate_share);
    out.uint(policy.recompute_first);
    out.uint(policy.recompute_last);
    out.optional(policy.max_cuts.map(usize::from));
    out.share(policy.max_lost_context);
    out.share(policy.max_new_context);
    out.optional((policy.scope == Scope::Conversation).then_some(policy.shared_prefix));
    out.share(policy.recompute_share);
    out.text(policy.repair.name());
}

pub(super) fn read(cursor: &mut ByteReader<'_>) -> Read<Option<ReusePolicy>> {
    if cursor.nil() {
        return Ok(None);
    }
    cursor.array_of(FIELDS as u64, "the policy")?;
    let mut policy = ReusePolicy {
        min_run: optional(cursor, "min_run")?,
        max_hops: number(cursor, "max_hops")?,
        max_approximate_share: cursor.share("max_approximate_share")?,
        recompute_first: number(cursor, "recompute_first")?,
        recompute_last: number(cursor, "recompute_last")?,
        max_cuts: optional(cursor, "max_cuts")?,
        max_lost_context: cursor.share("max_lost_context")?,
        max_new_context: cursor.share("max_new_context")?,
        ..ReusePolicy::LAXEST
    };
    if let Some(blocks) = optional(cursor, "shared_prefix")? {
        (policy.scope, policy.shared_prefix) = (Scope::Conversation, blocks);
    }
    policy.recompute_share = cursor.share("recompute_share")?;
    let name = cursor.text("repair")?;
    let name = cursor.shown(&name);
    policy.repair = Repair::named(name)
        .ok_or_else(|| cursor.wrong(format!("repair is {:?}", name.get(..name.len().min(16)))))?;
    let checked = policy.check(LEAST_RUN, READ);
    checked.map_err(|error| cursor.wrong(error.message()))?;
    Ok(Some(policy))
}

fn optional<T: TryFrom<u64>>(cursor: &mut ByteReader<'_>, what: &str) -> Read<Option<T>> {
    if cursor.nil() {
        return Ok(None);
    }
    number(cursor, what).map(Some)
}

fn number<T: TryFrom<u64>>(cursor: &mut ByteReader<'_>, what: &str) -> Read<T> {
    let number = cursor.uint(what)?;
    T::try_from(number).map_err(|_| cursor.wrong(format!("{what} is {number}, which is too large")))
}
