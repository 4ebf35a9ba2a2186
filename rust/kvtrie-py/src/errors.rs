//! The exceptions, and which one a core error becomes.

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
    LayoutError,
    KvTrieError,
    "Memory does not have the shape, dtype or device that a KV layout describes."
);
create_exception!(
    kvtrie,
    UnsupportedRopeError,
    KvTrieError,
    "The keys of a model cannot be moved by turning them, or its config does not say how they turn."
);

#[expect(
    clippy::match_same_arms,
    reason = "every kind is named; the last arm is there because the list may grow"
)]
pub(crate) fn exception(error: &Error) -> PyErr {
    let message = in_python(error.to_string());
    match error.kind() {
        ErrorKind::InvalidArgument => PyValueError::new_err(message),
        ErrorKind::BlockInUse => BlockInUseError::new_err(message),
        ErrorKind::OutOfBlocks => OutOfBlocksError::new_err(message),
        ErrorKind::StaleHandle => StaleHandleError::new_err(message),
        ErrorKind::Snapshot => SnapshotError::new_err(message),
        ErrorKind::BrokenInvariant => KvTrieError::new_err(message),
        _ => KvTrieError::new_err(message),
    }
}

/// A message of the core, with Python's name of the call.
fn in_python(message: String) -> String {
    let Some((call, rest)) = message.split_once(": ") else {
        return message;
    };
    let name = match call {
        "SequenceLedger::new" => "SequenceLedger",
        "SequenceLedger::final_end" => "SequenceLedger.final_range",
        "TransferManifest::new" => "TransferManifest.from_blocks",
        "Offer::of" | "Offer::manifest" => "TransferManifest.from_ledger",
        "TransferPlan::new" => "plan_transfer",
        _ if call.contains("::") => &call.replace("::", "."),
        _ => return message,
    };
    format!("{name}: {rest}")
}

/// The exception for a core error of a call that has another name in Rust.
pub(crate) fn exception_in(call: &str, error: &Error) -> PyErr {
    let message = error.to_string();
    let rest = message.split_once(": ").map_or(&*message, |(_, rest)| rest);
    exception(&Error::new(error.kind(), format!("{call}: {rest}")))
}

#[cold]
pub(crate) fn released(call: &str) -> PyErr {
    StaleHandleError::new_err(format!("{call}: the plan was released already"))
}

pub(crate) fn transfer_exception(error: &TransferError) -> PyErr {
    let (refusal, message) = match error {
        TransferError::Argument(error) => return exception(error),
        TransferError::Refused(refusal, message) => (refusal, message),
    };
    let error = TransferRefused::new_err(in_python(message.clone()));
    Python::attach(
        |py| match error.value(py).setattr("reason", refusal.as_str()) {
            Ok(()) => error,
            Err(failure) => failure,
        },
    )
}
