//! `Namespace` and the salt `SHARED`.

use std::sync::Arc;

use kvtrie_core::{Namespace, Salt};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::arguments::{arg, call, optional_text, text};
use crate::buffers::Arg;
use crate::fields::{Value, new_arguments, singleton, value_methods};
use crate::hints::{NewArguments, SaltValue};
use crate::output::quoted;

/// The type of `kvtrie.SHARED`, its only value.
///
/// Example:
///     >>> kvtrie.SHARED
///     SHARED
#[pyclass(frozen, module = "kvtrie", name = "SharedSalt")]
pub(crate) struct PySharedSalt;

singleton!(PySharedSalt, shared, "SHARED");

/// Everything besides tokens that KV depends on. Namespaces with equal fields share their KV; no
/// query returns KV of another namespace.
///
/// Args:
///     model: Model and revision, for instance `"qwen3-8b@1a2b"`.
///     kv_dtype: Element type and scales of the KV.
///     rope: How K is rotated by position, for instance `"yarn:4"`.
///     adapter: Content id of the adapter (LoRA), or None.
///     salt: Who may share the KV: one salt per tenant, or `kvtrie.SHARED` to share it on purpose.
///         There is no default, because tenants who share can learn each other's prompts. A
///         tenant's salt is a secret: no `repr`, message or log shows it, but the attribute,
///         pickles and snapshots contain it.
///
/// Raises:
///     TypeError: A field is not a str, or the salt is neither a str nor `SHARED`.
///     ValueError: A field is empty.
///
/// Example:
///     >>> a = kvtrie.Namespace(model="qwen3-8b@1a2b", kv_dtype="bfloat16", salt="tenant-a")
///     >>> a == kvtrie.Namespace(model="qwen3-8b@1a2b", kv_dtype="bfloat16", salt="tenant-b")
///     False
#[pyclass(frozen, eq, hash, module = "kvtrie", name = "Namespace")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct PyNamespace {
    pub(crate) core: Arc<Namespace>,
}

impl Value for PyNamespace {
    const FIELDS: &[&str] = &["model", "kv_dtype", "rope", "adapter", "salt"];
}

value_methods! {
    ///     >>> space = kvtrie.Namespace(model="m", salt=kvtrie.SHARED)
    ///     >>> space.replace(adapter="lora").adapter
    ///     'lora'
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

        /// How K is rotated by position.
        #[getter]
        fn rope(&self) -> &str {
            self.core.rope()
        }

        /// Content id of the adapter, or None.
        #[getter]
        fn adapter(&self) -> Option<&str> {
            self.core.adapter()
        }

        /// Who may share the KV: a tenant's str, or `SHARED`.
        #[getter]
        fn salt<'py>(&self, py: Python<'py>) -> PyResult<SaltValue<'py>> {
            Ok(self.salt_object(py)?.into())
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
            new_arguments(slf)
        }
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
