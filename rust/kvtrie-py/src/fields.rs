//! Methods that all value classes share: copies with changed fields, and pickles.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{PyTypeCheck, PyTypeInfo};

use crate::hints::NewArguments;

/// A class whose constructor takes all its fields by name.
pub(crate) trait Value {
    const FIELDS: &[&str];
}

/// Adds the `#[pymethods]` of a [`Value`]: its own, `replace` with the example that the doc comment
/// gives, and `__replace__`.
macro_rules! value_methods {
    ($(#[doc = $example:literal])* impl $class:ident { $($own:tt)* }) => {
        #[pymethods]
        impl $class {
            $($own)*

            /// A copy with some fields changed.
            ///
            /// Args:
            ///     changes: New values by field name.
            ///
            /// Raises:
            ///     TypeError: There is no such field, or a value has the wrong type.
            ///     ValueError: A value is out of its range.
            ///
            /// Example:
            $(#[doc = $example])*
            #[pyo3(signature = (**changes: "object"))]
            fn replace<'py>(
                slf: &Bound<'py, Self>,
                changes: Option<&Bound<'py, pyo3::types::PyDict>>,
            ) -> PyResult<Bound<'py, Self>> {
                crate::fields::replaced(slf, changes)
            }

            /// Same as `replace`, for `copy.replace`.
            #[pyo3(signature = (**changes: "object"))]
            fn __replace__<'py>(
                slf: &Bound<'py, Self>,
                changes: Option<&Bound<'py, pyo3::types::PyDict>>,
            ) -> PyResult<Bound<'py, Self>> {
                crate::fields::replaced(slf, changes)
            }
        }
    };
}

/// Adds the `#[pymethods]` of a class with one value, `kvtrie._core.NAME`, and a function that
/// returns the value.
macro_rules! singleton {
    ($class:ident, $get:ident, $name:literal) => {
        #[pymethods]
        impl $class {
            fn __repr__(&self) -> &'static str {
                $name
            }

            fn __reduce__(&self) -> &'static str {
                $name
            }
        }

        pub(crate) fn $get(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
            static VALUE: pyo3::sync::PyOnceLock<Py<PyAny>> = pyo3::sync::PyOnceLock::new();
            let found = || py.import("kvtrie._core")?.getattr($name).map(Bound::unbind);
            Ok(VALUE.get_or_try_init(py, found)?.bind(py).clone())
        }
    };
}

pub(crate) use {singleton, value_methods};

fn fields<'py, T: Value>(value: &Bound<'py, T>) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(value.py());
    for name in T::FIELDS {
        fields.set_item(name, value.as_any().getattr(*name)?)?;
    }
    Ok(fields)
}

pub(crate) fn new_arguments<'py, T: Value>(value: &Bound<'py, T>) -> PyResult<NewArguments<'py>> {
    let py = value.py();
    let arguments = (PyTuple::empty(py), fields(value)?);
    Ok(arguments.into_pyobject(py)?.into())
}

pub(crate) fn replaced<'py, T: Value + PyTypeInfo + PyTypeCheck>(
    value: &Bound<'py, T>,
    changes: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, T>> {
    let fields = fields(value)?;
    if let Some(changes) = changes {
        fields.update(changes.as_mapping())?;
    }
    let made = T::type_object(value.py()).call((), Some(&fields))?;
    Ok(made.cast_into()?)
}

/// Formats a value as `Class(field=value, …)`.
pub(crate) fn shown<T: Value + pyo3::PyClass>(value: &Bound<'_, T>) -> PyResult<String> {
    let mut shown = Vec::with_capacity(T::FIELDS.len());
    for (name, field) in fields(value)? {
        shown.push(format!("{name}={}", field.repr()?));
    }
    Ok(format!("{}({})", T::NAME, shown.join(", ")))
}
