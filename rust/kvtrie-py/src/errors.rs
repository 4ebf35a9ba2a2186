//! The exceptions, and which one a core error becomes.

use kvtrie_cluster::EventRefusal;
use kvtrie_core::{Error, ErrorKind};
use kvtrie_transfer::TransferError;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;

create_exception!(
    kvtrie,
    KvTrieError,
    PyException,
    "The root of kvtrie's own errors.\n\nWrong arguments are TypeError and ValueError instead. A call that fails changes nothing."
);
create_exception!(
    kvtrie,
    BlockInUseError,
    KvTrieError,
    "A block id was offered for a place while it backs another one, or twice in one call."
);
create_exception!(
    kvtrie,
    OutOfBlocksError,
    KvTrieError,
    "Fewer blocks can be had than were asked for. Nothing was handed out and nothing evicted."
);
create_exception!(
    kvtrie,
    StaleHandleError,
    KvTrieError,
    "A plan was used after it was released, a request that a ledger does not have (any more), or, in a child after\n`os.fork`, a handle that the parent made."
);
create_exception!(
    kvtrie,
    SnapshotError,
    KvTrieError,
    "Bytes that should be a snapshot of an index are none, are damaged, or exceed a limit."
);
create_exception!(
    kvtrie,
    TransferRefused,
    KvTrieError,
    "A transfer manifest cannot be read, or is not meant for the one who asks.\n\n`reason` says why in one word. Bytes: \"malformed\", \"version\", \"limits\". A plan: \"digest\" (another key, or\na changed manifest), \"namespace\", \"groups\"."
);
create_exception!(
    kvtrie,
    EventError,
    KvTrieError,
    "A batch of KV events cannot be read, or is not of the worker it is applied to. Nothing of it was applied.\n\n`reason` says why in one word: \"malformed\", \"block_size\", \"limit\", \"rank\" (another data-parallel rank than before)\nor \"key\"."
);
create_exception!(
    kvtrie,
    LayoutError,
    KvTrieError,
    "Memory does not have the shape, dtype or device that a KV layout describes."
);
create_exception!(
    kvtrie,
    UnsupportedRopeError,
    KvTrieError,
    "The keys of a model cannot be re-rotated, or its config does not say how they are rotated."
);

/// Calls of Rust that Python has under another name. Of the others, `A::new` is `A`, and `A::call` and `A::call_within`
/// are `A.call`.
const CALLS: [(&str, &str); 15] = [
    ("Item::taking", "Item"),
    ("KvIndexer::find", "KvIndexer.find_matches"),
    ("Offer::manifest", "TransferManifest.from_ledger"),
    ("Offer::of", "TransferManifest.from_ledger"),
    ("RadixIndex::lookup_pinned_within", "RadixIndex.pin"),
    ("RadixIndex::lookup_ranges_within", "RadixIndex.lookup"),
    ("RadixIndex::plan_from", "RadixIndex.plan"),
    ("RadixIndex::recompute", "ReusePlan.recompute"),
    ("RadixIndex::release", "ReusePlan.release"),
    ("RadixIndex::release_pin", "Pin.release"),
    ("RadixIndex::release_sources", "ReusePlan.release_sources"),
    ("RadixIndex::validate", "ReusePlan.validate"),
    ("SequenceLedger::final_end", "SequenceLedger.final_range"),
    ("TransferManifest::new", "TransferManifest.from_blocks"),
    ("TransferPlan::new", "plan_transfer"),
];

/// By call: what a message begins with, in Rust and in Python.
const WORDS: [(&str, &str, &str); 3] = [
    (
        "Namespace::new",
        "the salt is empty; give each tenant its own, or say Salt::Shared ",
        "the salt is empty; give each tenant its own, or say SHARED ",
    ),
    ("RadixIndex::insert", "ids ", "blocks "),
    ("TokenSequence::truncate", "len ", "n "),
];

fn call_in_python(call: &str) -> String {
    if let Some((_, python)) = CALLS.iter().find(|(rust, _)| *rust == call) {
        return (*python).to_owned();
    }
    let name = call.strip_suffix("_within").unwrap_or(call);
    name.strip_suffix("::new")
        .unwrap_or(name)
        .replace("::", ".")
}

fn message_in_python(call: &str, message: &str) -> String {
    for (of, rust, python) in WORDS {
        if of == call
            && let Some(rest) = message.strip_prefix(rust)
        {
            return format!("{python}{rest}");
        }
    }
    // A part of a snapshot is refused by the call that makes it.
    match message.split_once(": ") {
        Some((inner, rest)) if inner.contains("::") && !inner.contains(' ') => {
            in_python(inner, rest)
        }
        _ => message.to_owned(),
    }
}

fn in_python(call: &str, message: &str) -> String {
    format!(
        "{}: {}",
        call_in_python(call),
        message_in_python(call, message)
    )
}

#[expect(
    clippy::match_same_arms,
    reason = "every kind is named; the last arm is there because the list may grow"
)]
fn of_kind(kind: ErrorKind, message: String) -> PyErr {
    match kind {
        ErrorKind::InvalidArgument => PyValueError::new_err(message),
        ErrorKind::BlockInUse => BlockInUseError::new_err(message),
        ErrorKind::OutOfBlocks => OutOfBlocksError::new_err(message),
        ErrorKind::StaleHandle => StaleHandleError::new_err(message),
        ErrorKind::Snapshot => SnapshotError::new_err(message),
        ErrorKind::BrokenInvariant => KvTrieError::new_err(message),
        _ => KvTrieError::new_err(message),
    }
}

pub(crate) fn exception(error: &Error) -> PyErr {
    of_kind(error.kind(), in_python(error.call(), error.message()))
}

/// The exception for an error inside the Python call `call`.
pub(crate) fn exception_in(call: &str, error: &Error) -> PyErr {
    let message = message_in_python(error.call(), error.message());
    of_kind(error.kind(), format!("{call}: {message}"))
}

#[cold]
pub(crate) fn released(call: &str, what: &str) -> PyErr {
    StaleHandleError::new_err(format!("{call}: the {what} was released already"))
}

pub(crate) fn transfer_exception(error: &TransferError) -> PyErr {
    let (refusal, call, message) = match error {
        TransferError::Argument(error) => return exception(error),
        TransferError::Refused {
            refusal,
            call,
            message,
        } => (refusal, call, message),
    };
    let error = TransferRefused::new_err(in_python(call, message));
    Python::attach(
        |py| match error.value(py).setattr("reason", refusal.as_str()) {
            Ok(()) => error,
            Err(failure) => failure,
        },
    )
}

pub(crate) fn event_exception(error: &kvtrie_cluster::EventError) -> PyErr {
    let message = in_python("KvIndexer::apply", error.message());
    if error.refusal() == EventRefusal::Worker {
        return StaleHandleError::new_err(message);
    }
    let exception = EventError::new_err(message);
    Python::attach(|py| {
        let value = exception.value(py);
        match value.setattr("reason", error.refusal().as_str()) {
            Ok(()) => exception,
            Err(failure) => failure,
        }
    })
}
