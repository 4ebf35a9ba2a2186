//! Reads arguments for `from_py_with`, with errors that name the call and the argument.
//!
//! PyO3 puts the argument's name into a note, which `str(error)` omits, and never names the call.

use kvtrie_core::SessionId;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBool;
use pyo3::{PyTypeCheck, PyTypeInfo};

use crate::buffers::{self, Arg};

pub(crate) trait Name {
    const NAME: &'static str;
}

macro_rules! names {
    ($(#[doc = $doc:literal] $kind:ident { $($name:ident = $text:literal,)* })*) => {$(
        #[doc = $doc]
        pub(crate) mod $kind {
            $(
                pub(crate) struct $name;

                impl super::Name for $name {
                    const NAME: &'static str = $text;
                }
            )*
        }
    )*};
}

names! {
    #[doc = "Calls, as messages begin."]
    call {
        BlockAllocator = "BlockAllocator",
        BlockAllocatorAllocate = "BlockAllocator.allocate",
        GroupState = "Group.state",
        GroupWindow = "Group.window",
        Imported = "Imported",
        Item = "Item",
        KvIndexer = "KvIndexer",
        KvIndexerAddWorker = "KvIndexer.add_worker",
        KvIndexerApply = "KvIndexer.apply",
        KvIndexerClearWorker = "KvIndexer.clear_worker",
        KvIndexerDigest = "KvIndexer.digest",
        KvIndexerDigests = "KvIndexer.digests",
        KvIndexerFindMatches = "KvIndexer.find_matches",
        KvIndexerRemoveWorker = "KvIndexer.remove_worker",
        KvIndexerSetCertainFor = "KvIndexer.set_certain_for",
        KvIndexerSetPolicy = "KvIndexer.set_policy",
        KvIndexerSetUncertain = "KvIndexer.set_uncertain",
        KvIndexerWorkerStats = "KvIndexer.worker_stats",
        Namespace = "Namespace",
        PlanTransfer = "plan_transfer",
        RadixIndex = "RadixIndex",
        RadixIndexDiscard = "RadixIndex.discard",
        RadixIndexDrop = "RadixIndex.drop",
        RadixIndexEvict = "RadixIndex.evict",
        RadixIndexExplain = "RadixIndex.explain",
        RadixIndexGroupStats = "RadixIndex.group_stats",
        RadixIndexInsert = "RadixIndex.insert",
        RadixIndexLookup = "RadixIndex.lookup",
        RadixIndexMatch = "RadixIndex.match",
        RadixIndexMarkDead = "RadixIndex.mark_dead",
        RadixIndexPathTokens = "RadixIndex.path_tokens",
        RadixIndexPin = "RadixIndex.pin",
        RadixIndexPlan = "RadixIndex.plan",
        RadixIndexRemoveSpans = "RadixIndex.remove_spans",
        RadixIndexRestore = "RadixIndex.restore",
        RadixIndexTag = "RadixIndex.tag",
        RadixIndexTakeFreed = "RadixIndex.take_freed",
        RadixIndexTags = "RadixIndex.tags",
        ReusePlanAdvance = "ReusePlan.advance",
        ReusePlanGroup = "ReusePlan.group",
        ReusePlanMoves = "ReusePlan.moves",
        ReusePlanRebuild = "ReusePlan.rebuild",
        ReusePlanState = "ReusePlan.state",
        ReusePolicy = "ReusePolicy",
        ReusePolicyIsAtLeastAsStrictAs = "ReusePolicy.is_at_least_as_strict_as",
        SequenceLedger = "SequenceLedger",
        SequenceLedgerAdvance = "SequenceLedger.advance",
        SequenceLedgerBegin = "SequenceLedger.begin",
        SequenceLedgerBlocksFor = "SequenceLedger.blocks_for",
        SequenceLedgerCommit = "SequenceLedger.commit",
        SequenceLedgerConfirm = "SequenceLedger.confirm",
        SequenceLedgerFinish = "SequenceLedger.finish",
        SequenceLedgerHeld = "SequenceLedger.held",
        SequenceLedgerHold = "SequenceLedger.hold",
        SequenceLedgerRollback = "SequenceLedger.rollback",
        SequenceLedgerSchedule = "SequenceLedger.schedule",
        SlotTable = "SlotTable",
        SlotTableTake = "SlotTable.take",
        Span = "Span",
        TokenSequence = "TokenSequence",
        TokenSequencePosition = "TokenSequence.position",
        TokenSequenceTruncate = "TokenSequence.truncate",
        TransferLimits = "TransferLimits",
        TransferManifestFromBlocks = "TransferManifest.from_blocks",
        TransferManifestFromBytes = "TransferManifest.from_bytes",
        TransferManifestFromLedger = "TransferManifest.from_ledger",
    }
    #[doc = "Their arguments."]
    arg {
        Adapter = "adapter",
        Approximate = "approximate",
        Block = "block",
        BlockSize = "block_size",
        Context = "context",
        Count = "count",
        Digest = "digest",
        DropBlocks = "drop_blocks",
        End = "end",
        EvictFrom = "evict_from",
        ExactUntil = "exact_until",
        Force = "force",
        Found = "found",
        Group = "group",
        HashBits = "hash_bits",
        Hops = "hops",
        Index = "index",
        KeepLast = "keep_last",
        Key = "key",
        Kind = "kind",
        KvDtype = "kv_dtype",
        Ledger = "ledger",
        Limit = "limit",
        Limits = "limits",
        LocalSeq = "local_seq",
        Manifest = "manifest",
        MaxApproximateShare = "max_approximate_share",
        MaxBatchBytes = "max_batch_bytes",
        MaxBlockSize = "max_block_size",
        MaxBlocks = "max_blocks",
        MaxBytes = "max_bytes",
        MaxCandidates = "max_candidates",
        MaxCuts = "max_cuts",
        MaxGroups = "max_groups",
        MaxHops = "max_hops",
        MaxLostContext = "max_lost_context",
        MaxNewContext = "max_new_context",
        MaxParked = "max_parked",
        MaxRuns = "max_runs",
        MaxTokens = "max_tokens",
        MaxWorkers = "max_workers",
        Milliseconds = "milliseconds",
        MinRun = "min_run",
        Model = "model",
        Moved = "moved",
        MovedEnd = "moved_end",
        MovedRuns = "moved_runs",
        ItemPositions = "item_positions",
        N = "n",
        Name = "name",
        Namespace = "namespace",
        NumBlocks = "num_blocks",
        NumComputed = "num_computed",
        NumDrafts = "num_drafts",
        NumLookahead = "num_lookahead",
        NumSlots = "num_slots",
        NumTokens = "num_tokens",
        Other = "other",
        PartialBlocks = "partial_blocks",
        Path = "path",
        Payload = "payload",
        Pin = "pin",
        Plan = "plan",
        Policy = "policy",
        Position = "position",
        Positions = "positions",
        RecomputeFirst = "recompute_first",
        RecomputeLast = "recompute_last",
        RecomputeShare = "recompute_share",
        Repair = "repair",
        Rope = "rope",
        Scope = "scope",
        Seed = "seed",
        Seq = "seq",
        Session = "session",
        SharedPrefix = "shared_prefix",
        Start = "start",
        To = "to",
        Token = "token",
        Touch = "touch",
        Uncertain = "uncertain",
        Window = "window",
        Worker = "worker",
    }
}

const fn named<C: Name, A: Name>() -> Arg {
    Arg::new(C::NAME, A::NAME)
}

pub(crate) fn int<C: Name, A: Name>(value: &Bound<'_, PyAny>) -> PyResult<i128> {
    buffers::int(value).map_err(|error| named::<C, A>().not_read(value, error, "an int"))
}

pub(crate) fn optional_int<C: Name, A: Name>(value: &Bound<'_, PyAny>) -> PyResult<Option<i128>> {
    optional(value, int::<C, A>)
}

pub(crate) fn flag<C: Name, A: Name>(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let read = value.extract();
    read.map_err(|error| named::<C, A>().not_read(value, error, "a bool"))
}

pub(crate) fn share<C: Name, A: Name>(value: &Bound<'_, PyAny>) -> PyResult<f64> {
    let (arg, wanted) = (named::<C, A>(), "a float");
    if value.is_instance_of::<PyBool>() {
        return Err(arg.wrong_type(value, wanted));
    }
    let read = value.extract();
    read.map_err(|error| arg.not_read(value, error, wanted))
}

pub(crate) fn text<C: Name, A: Name>(value: &Bound<'_, PyAny>) -> PyResult<String> {
    let read = value.extract();
    read.map_err(|error| named::<C, A>().not_read(value, error, "a str"))
}

pub(crate) fn optional_text<C: Name, A: Name>(
    value: &Bound<'_, PyAny>,
) -> PyResult<Option<String>> {
    optional(value, text::<C, A>)
}

pub(crate) fn session<C: Name, A: Name>(value: &Bound<'_, PyAny>) -> PyResult<Option<SessionId>> {
    let Some(id) = optional_text::<C, A>(value)? else {
        return Ok(None);
    };
    let session = SessionId::new(&id);
    let session = session
        .map_err(|error| PyValueError::new_err(format!("{}: {}", C::NAME, error.message())))?;
    Ok(Some(session))
}

pub(crate) fn of<'a, 'py, C: Name, A: Name, T: PyTypeCheck + PyTypeInfo>(
    value: &'a Bound<'py, PyAny>,
) -> PyResult<&'a Bound<'py, T>> {
    value.cast::<T>().map_err(|_| {
        let name = T::type_object(value.py()).name();
        let name = name.map_or_else(|_| "?".to_owned(), |name| name.to_string());
        let article = if name.starts_with(['A', 'E', 'I', 'O']) {
            "an"
        } else {
            "a"
        };
        // Every name but `bytes` is a class of this package.
        let wanted = if name == "bytes" {
            name
        } else {
            format!("{article} {name}")
        };
        named::<C, A>().wrong_type(value, &wanted)
    })
}

pub(crate) fn optional_of<'a, 'py, C: Name, A: Name, T: PyTypeCheck + PyTypeInfo>(
    value: &'a Bound<'py, PyAny>,
) -> PyResult<Option<&'a Bound<'py, T>>> {
    optional(value, of::<C, A, T>)
}

fn optional<'a, 'py, R>(
    value: &'a Bound<'py, PyAny>,
    read: impl FnOnce(&'a Bound<'py, PyAny>) -> PyResult<R>,
) -> PyResult<Option<R>> {
    if value.is_none() {
        Ok(None)
    } else {
        read(value).map(Some)
    }
}
