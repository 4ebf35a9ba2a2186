//! `Namespace` and the salt `SHARED`.

use std::sync::Arc;

use kvtrie_core::{Namespace, Salt};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString};

use crate::arguments::{arg, call, optional_text, text};
use crate::buffers::Arg;
use crate::fields::{new_arguments, replaced};
use crate::hints::{NewArguments, SaltValue};
use crate::output::quoted;

/// The type of `kvtrie.SHARED`, of which there is one value.
///
/// Example:
///     >>> import copy, kvtrie
///     >>> kvtrie.SHARED
///     SHARED
///     >>> copy.deepcopy(kvtrie.SHARED) is kvtrie.SHARED
///     True
#[pyclass(frozen, module = "kvtrie", name = "SharedSalt")]
pub(crate) struct PySharedSalt;

#[pymethods]
impl PySharedSalt {
    #[expect(clippy::unused_self, reason = "Python calls it on the value")]
    fn __repr__(&self) -> &'static str {
        "SHARED"
    }

    #[expect(clippy::unused_self, reason = "Python calls it on the value")]
    fn __reduce__(&self) -> &'static str {
        "SHARED"
    }
}

fn shared(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    static SHARED: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let found = || {
        py.import("kvtrie._core")?
            .getattr("SHARED")
            .map(Bound::unbind)
    };
    Ok(SHARED.get_or_try_init(py, found)?.bind(py).clone())
}

/// Everything besides tokens that KV depends on. No query sees across a namespace.
///
/// Namespaces are values: two with the same fields are equal and share their KV.
///
/// Args:
///     model: Model and revision, for instance `"qwen3-8b@1a2b"`.
///     kv_dtype: Element type and scales of the KV.
///     rope: How positions turn K, for instance `"yarn:4"`.
///     adapter: Content id of the adapter (LoRA), or None.
///     salt: Who may share: one salt per tenant, or `kvtrie.SHARED` to share on purpose. There is no
///         default, because sharing across tenants tells each what the others have asked. A tenant's
///         salt is a secret: no `repr`, message or log shows it. The attribute, pickles and snapshots
///         have it.
///
/// Raises:
///     TypeError: A field is not a str, or the salt is neither a str nor `SHARED`.
///     ValueError: A field is empty.
///
/// Example:
///     >>> import kvtrie
///     >>> a = kvtrie.Namespace(model="qwen3-8b@1a2b", kv_dtype="bfloat16", salt="tenant-a")
///     >>> a == kvtrie.Namespace(model="qwen3-8b@1a2b", kv_dtype="bfloat16", salt="tenant-b")
///     False
///     >>> kvtrie.Namespace(model="qwen3-8b@1a2b", salt=kvtrie.SHARED).salt
///     SHARED
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "Namespace")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyNamespace {
    pub(crate) core: Arc<Namespace>,
}

const FIELDS: [&str; 5] = ["model", "kv_dtype", "rope", "adapter", "salt"];

#[pymethods]
impl PyNamespace {
    #[new]
    #[pyo3(signature = (
        *, model: "str", kv_dtype: "str" = String::from("auto"), rope: "str" = String::from("default"), adapter: "str | None" = None,
        salt: "str | SharedSalt"
    ), text_signature = "(*, model, kv_dtype='auto', rope='default', adapter=None, salt)")]
    fn new(
        #[pyo3(from_py_with = text::<call::Namespace, arg::Model>)] model: String,
        #[pyo3(from_py_with = text::<call::Namespace, arg::KvDtype>)] kv_dtype: String,
        #[pyo3(from_py_with = text::<call::Namespace, arg::Rope>)] rope: String,
        #[pyo3(from_py_with = optional_text::<call::Namespace, arg::Adapter>)] adapter: Option<
            String,
        >,
        salt: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let salt = if salt.is_instance_of::<PySharedSalt>() {
            Salt::Shared
        } else if let Ok(salt) = salt.cast::<PyString>() {
            Salt::Tenant(salt.extract()?)
        } else {
            let arg = Arg::new("Namespace", "salt");
            return Err(arg.wrong_type(salt, "a str, one per tenant, or kvtrie.SHARED"));
        };
        let core = Namespace::new(model, kv_dtype, rope, adapter, salt);
        Ok(Self {
            core: Arc::new(core.map_err(|error| crate::errors::exception(&error))?),
        })
    }

    /// Model and revision.
    #[getter]
    fn model(&self) -> &str {
        self.core.model()
    }

    /// Element type and scales of the KV.
    #[getter]
    fn kv_dtype(&self) -> &str {
        self.core.kv_dtype()
    }

    /// How positions turn K.
    #[getter]
    fn rope(&self) -> &str {
        self.core.rope()
    }

    /// Content id of the adapter, or None.
    #[getter]
    fn adapter(&self) -> Option<&str> {
        self.core.adapter()
    }

    /// Who may share this KV: a tenant's str, or `SHARED`.
    #[getter]
    fn salt<'py>(&self, py: Python<'py>) -> PyResult<SaltValue<'py>> {
        Ok(self.salt_object(py)?.into())
    }

    /// This namespace with some fields changed.
    ///
    /// Args:
    ///     changes: New values by the names of the fields.
    ///
    /// Raises:
    ///     TypeError: There is no such field, or a value has the wrong type.
    ///     ValueError: A value is out of its range.
    ///
    /// Example:
    ///     >>> import kvtrie
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> space.replace(adapter="lora").adapter
    ///     'lora'
    #[pyo3(signature = (**changes: "object"))]
    fn replace<'py>(
        slf: &Bound<'py, Self>,
        changes: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, Self>> {
        replaced(slf, &FIELDS, changes)
    }

    /// The same, for `copy.replace`.
    #[pyo3(signature = (**changes: "object"))]
    fn __replace__<'py>(
        slf: &Bound<'py, Self>,
        changes: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, Self>> {
        replaced(slf, &FIELDS, changes)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let adapter = match self.core.adapter() {
            Some(adapter) => quoted(py, adapter)?,
            None => "None".to_owned(),
        };
        Ok(format!(
            "Namespace(model={}, kv_dtype={}, rope={}, adapter={adapter}, salt={})",
            quoted(py, self.core.model())?,
            quoted(py, self.core.kv_dtype())?,
            quoted(py, self.core.rope())?,
            match self.core.salt() {
                Salt::Shared => "SHARED",
                Salt::Tenant(_) => "<redacted>",
            }
        ))
    }

    fn __getnewargs_ex__<'py>(slf: &Bound<'py, Self>) -> PyResult<NewArguments<'py>> {
        new_arguments(slf, &FIELDS)
    }
}

impl PyNamespace {
    fn salt_object<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.core.salt() {
            Salt::Shared => shared(py),
            Salt::Tenant(salt) => Ok(PyString::new(py, salt).into_any()),
        }
    }
}
