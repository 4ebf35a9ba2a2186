//! Copies and pickles of values: their fields by name.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{PyTypeCheck, PyTypeInfo};

use crate::hints::NewArguments;

fn fields<'py, T>(value: &Bound<'py, T>, names: &[&str]) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(value.py());
    for name in names {
        fields.set_item(name, value.as_any().getattr(*name)?)?;
    }
    Ok(fields)
}

/// What `__new__` takes for this value.
pub(crate) fn new_arguments<'py, T>(
    value: &Bound<'py, T>,
    names: &[&str],
) -> PyResult<NewArguments<'py>> {
    let py = value.py();
    let arguments = (PyTuple::empty(py), fields(value, names)?);
    Ok(arguments.into_pyobject(py)?.into())
}

/// This value with some fields changed, made and checked as every other one.
pub(crate) fn replaced<'py, T: PyTypeInfo + PyTypeCheck>(
    value: &Bound<'py, T>,
    names: &[&str],
    changes: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, T>> {
    let fields = fields(value, names)?;
    if let Some(changes) = changes {
        fields.update(changes.as_mapping())?;
    }
    let made = T::type_object(value.py()).call((), Some(&fields))?;
    Ok(made.cast_into()?)
}
