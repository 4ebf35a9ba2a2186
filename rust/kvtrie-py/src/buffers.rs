//! Reads integers and lists of integers from Python. Every value is checked and none is wrapped.

use std::ffi::CStr;
use std::marker::PhantomData;
use std::ops::{Range, RangeInclusive};

use numpy::{
    Element, PyArray1, PyArrayDescrMethods, PyArrayMethods, PyReadonlyArray1, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::exceptions::{PyException, PyMemoryError, PyOverflowError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyBool, PyBytes, PyInt, PyIterator, PyList, PyMemoryView, PyRange, PyTuple, PyType,
};

/// One past the largest token id.
pub(crate) const TOKEN_IDS: u64 = 1 << 32;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Arg {
    pub(crate) call: &'static str,
    pub(crate) name: &'static str,
}

/// Reads an integer of any size: an int or an object with `__index__`, but not a bool.
pub(crate) fn int(value: &Bound<'_, PyAny>) -> PyResult<i128> {
    if value.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err(
            "'bool' object cannot be interpreted as an integer here",
        ));
    }
    let beyond = |error: &PyErr| error.is_instance_of::<PyOverflowError>(value.py());
    match value.extract::<i64>() {
        Ok(value) => Ok(value.into()),
        Err(error) if beyond(&error) => value.extract::<i128>().map_err(|error| {
            if beyond(&error) {
                PyValueError::new_err(
                    "the integer is beyond every limit: it has more than 128 bits",
                )
            } else {
                error
            }
        }),
        Err(error) => Err(error),
    }
}

/// Whether an error is not about the argument: it is no `Exception` (such as `KeyboardInterrupt`)
/// or a lack of memory.
fn is_foreign(error: &PyErr, py: Python<'_>) -> bool {
    !error.is_instance_of::<PyException>(py) || error.is_instance_of::<PyMemoryError>(py)
}

/// The default that Python's signature shows as an empty tuple.
pub(crate) fn nothing<'a, 'py>() -> Option<&'a Bound<'py, PyAny>> {
    None
}

/// The default that Python's signature shows as empty bytes.
pub(crate) fn no_bytes<'a, 'py>() -> Option<&'a Bound<'py, PyBytes>> {
    None
}

impl Arg {
    pub(crate) const fn new(call: &'static str, name: &'static str) -> Self {
        Self { call, name }
    }

    pub(crate) fn within<T>(self, value: i128, low: T, high: T) -> PyResult<T>
    where
        T: Copy + Into<i128> + TryFrom<i128>,
    {
        let limits = low.into()..=high.into();
        match T::try_from(value) {
            Ok(fitting) if limits.contains(&value) => Ok(fitting),
            _ => Err(PyValueError::new_err(format!(
                "{}: {} is {value}; it must be in [{}, {}]",
                self.call,
                self.name,
                limits.start(),
                limits.end()
            ))),
        }
    }

    pub(crate) fn count(self, value: i128) -> PyResult<usize> {
        let count = self.within(value, 0, i64::MAX)?;
        usize::try_from(count).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    pub(crate) fn type_error(self, value: &Bound<'_, PyAny>, wanted: &str) -> PyErr {
        PyTypeError::new_err(format!(
            "{}: {} is of type '{}'; it must be {wanted}",
            self.call,
            self.name,
            type_name(value)
        ))
    }

    pub(crate) fn wrong_type(self, value: &Bound<'_, PyAny>, wanted: &str) -> PyErr {
        self.type_error(value, wanted)
    }

    fn range_error(self, position: usize, value: i128, limit: u64) -> PyErr {
        PyValueError::new_err(format!(
            "{}: {}[{position}] is {value}; it must be in [0, {limit})",
            self.call, self.name
        ))
    }

    fn limits_error(self, position: usize, value: i128, limits: &RangeInclusive<i64>) -> PyErr {
        PyValueError::new_err(format!(
            "{}: {}[{position}] is {value}; it must be in [{}, {}]",
            self.call,
            self.name,
            limits.start(),
            limits.end()
        ))
    }

    fn element_error(self, position: usize, error: PyErr, py: Python<'_>) -> PyErr {
        self.because(&format!("[{position}]"), error, py)
    }

    pub(crate) fn not_read(self, value: &Bound<'_, PyAny>, error: PyErr, wanted: &str) -> PyErr {
        let py = value.py();
        if !error.is_instance_of::<PyTypeError>(py) {
            return self.because("", error, py);
        }
        let wrong = self.wrong_type(value, wanted);
        wrong.set_cause(py, Some(error));
        wrong
    }

    /// Prepends the argument's name to `error`, which becomes the cause. An exception other than
    /// `ValueError` comes from the value's own methods, so it becomes a `TypeError`.
    fn because(self, place: &str, error: PyErr, py: Python<'_>) -> PyErr {
        if is_foreign(&error, py) {
            return error;
        }
        let message = format!("{}: {}{place}: {}", self.call, self.name, error.value(py));
        let wrong = if error.is_instance_of::<PyValueError>(py) {
            PyValueError::new_err(message)
        } else {
            PyTypeError::new_err(message)
        };
        wrong.set_cause(py, Some(error));
        wrong
    }

    pub(crate) fn iterate<'py>(
        self,
        value: &Bound<'py, PyAny>,
        wanted: &str,
    ) -> PyResult<Bound<'py, PyIterator>> {
        let iterator = value.try_iter();
        iterator.map_err(|error| self.not_read(value, error, wanted))
    }

    pub(crate) fn not_buffer(self, value: &Bound<'_, PyAny>, error: PyErr, wanted: &str) -> PyErr {
        let py = value.py();
        if is_foreign(&error, py) {
            return error;
        }
        let wrong = self.wrong_type(value, wanted);
        wrong.set_cause(py, Some(error));
        wrong
    }

    pub(crate) fn int_at(self, position: usize, value: &Bound<'_, PyAny>) -> PyResult<i128> {
        int(value).map_err(|error| self.element_error(position, error, value.py()))
    }

    pub(crate) fn wrong_item(
        self,
        position: usize,
        value: &Bound<'_, PyAny>,
        wanted: &str,
    ) -> PyErr {
        PyTypeError::new_err(format!(
            "{}: {}[{position}] is of type '{}'; it must be {wanted}",
            self.call,
            self.name,
            type_name(value)
        ))
    }
}

pub(crate) fn type_name(value: &Bound<'_, PyAny>) -> String {
    value
        .get_type()
        .name()
        .map_or_else(|_| "?".to_owned(), |name| name.to_string())
}

/// A list of integers that is not read yet.
pub(crate) enum Integers<'py> {
    List(Bound<'py, PyList>),
    Tuple(Bound<'py, PyTuple>),
    Longs(Longs<'py>),
    // The arrays are contiguous and aligned.
    I64(PyReadonlyArray1<'py, i64>),
    I32(PyReadonlyArray1<'py, i32>),
    U32(PyReadonlyArray1<'py, u32>),
    U64(PyReadonlyArray1<'py, u64>),
}

impl<'py> Integers<'py> {
    const WANTED: &'static str = "a list, a tuple, a range, an array.array, a memoryview, a one-dimensional \
        numpy array or a CPU tensor of integers";

    /// Opens a value. The elements of lists and tuples are not checked.
    pub(crate) fn open(value: &Bound<'py, PyAny>, arg: Arg) -> PyResult<Self> {
        if let Ok(list) = value.cast::<PyList>() {
            return Ok(Self::List(list.clone()));
        }
        if let Some(array) = Longs::open(value)? {
            return Ok(Self::Longs(array));
        }
        if let Some(array) = Self::ready(value) {
            return Ok(array);
        }
        if let Ok(tuple) = value.cast::<PyTuple>() {
            return Ok(Self::Tuple(tuple.clone()));
        }
        if let Ok(array) = value.cast::<PyUntypedArray>() {
            return Self::convert(array, arg);
        }
        let py = value.py();
        if value.is_instance_of::<PyRange>() {
            return Ok(Self::List(
                py.get_type::<PyList>().call1((value,))?.cast_into()?,
            ));
        }
        let known = value.is_instance_of::<PyMemoryView>()
            || value.is_instance(array_type(py)?)?
            || value.get_type().hasattr("__array__")?;
        if !known {
            return Err(arg.type_error(value, Self::WANTED));
        }
        let array = asarray(value).map_err(|error| {
            if is_foreign(&error, py) {
                return error;
            }
            let wrong = arg.type_error(value, Self::WANTED);
            let message = format!("{}; numpy says: {}", wrong.value(py), error.value(py));
            let wrong = PyTypeError::new_err(message);
            wrong.set_cause(py, Some(error));
            wrong
        })?;
        match Self::ready(&array) {
            Some(array) => Ok(array),
            None => Self::convert(array.cast::<PyUntypedArray>()?, arg),
        }
    }

    /// Opens an array whose memory can be read directly.
    fn ready(value: &Bound<'py, PyAny>) -> Option<Self> {
        fn typed<'py, T: Element>(value: &Bound<'py, PyAny>) -> Option<PyReadonlyArray1<'py, T>> {
            let array = value.cast_exact::<PyArray1<T>>().ok()?;
            let borrowed = array.try_readonly().ok()?;
            borrowed.as_slice().is_ok().then_some(borrowed)
        }
        // The most frequent types come first: tokens are uint32, block ids int32.
        typed(value)
            .map(Self::U32)
            .or_else(|| typed(value).map(Self::I32))
            .or_else(|| typed(value).map(Self::I64))
            .or_else(|| typed(value).map(Self::U64))
    }

    /// Converts any other array: a subclass, strided, misaligned, of another width or byte order.
    fn convert(array: &Bound<'py, PyUntypedArray>, arg: Arg) -> PyResult<Self> {
        let py = array.py();
        let kind = array.dtype().kind();
        if kind != b'i' && kind != b'u' {
            return Err(PyTypeError::new_err(format!(
                "{}: {} has dtype {}; it must be an integer dtype",
                arg.call,
                arg.name,
                array.dtype()
            )));
        }
        if array.ndim() != 1 {
            return Err(PyValueError::new_err(format!(
                "{}: {} has {} dimensions; it must have 1",
                arg.call,
                arg.name,
                array.ndim()
            )));
        }
        if array.hasattr("mask")? {
            return Err(arg.type_error(array, Self::WANTED));
        }
        let plain = asarray(array)?;
        if let Some(ready) = Self::ready(&plain) {
            return Ok(ready);
        }
        // Every value fits into the widest type of its sign.
        let wide = if kind == b'i' {
            numpy::dtype::<i64>(py)
        } else {
            numpy::dtype::<u64>(py)
        };
        let copy = plain.call_method1("astype", (wide, "C"))?;
        Self::ready(&copy).ok_or_else(|| arg.type_error(array, Self::WANTED))
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Tuple(tuple) => tuple.len(),
            Self::Longs(array) => array.values().len(),
            Self::I64(array) => array.len(),
            Self::I32(array) => array.len(),
            Self::U32(array) => array.len(),
            Self::U64(array) => array.len(),
        }
    }

    /// Reads the integers of a range. Each must be in `0..limit`.
    pub(crate) fn read(&self, range: Range<usize>, limit: u64, arg: Arg) -> PyResult<Vec<u32>> {
        match self {
            Self::List(list) => read_objects(list.py(), range, limit, arg, |at| list.get_item(at)),
            Self::Tuple(tuple) => {
                read_objects(tuple.py(), range, limit, arg, |at| tuple.get_item(at))
            }
            Self::Longs(array) => narrow(&array.values()[range.clone()], range.start, limit, arg),
            Self::I64(array) => read_array(array, range, limit, arg),
            Self::I32(array) => read_array(array, range, limit, arg),
            Self::U32(array) => read_array(array, range, limit, arg),
            Self::U64(array) => read_array(array, range, limit, arg),
        }
    }
}

/// The memory of an `array.array` of 64-bit integers, in which engines keep tokens: numpy takes longer to make a view of
/// one, and pyo3's buffer allocates and asks for what is known here.
pub(crate) struct Longs<'py> {
    view: ffi::Py_buffer,
    py: PhantomData<Python<'py>>,
}

impl<'py> Longs<'py> {
    /// `None` for any other value, and for an array of another width.
    fn open(value: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        let py = value.py();
        if !value.get_type().is(array_type(py)?) {
            return Ok(None);
        }
        let mut view = ffi::Py_buffer::new();
        // SAFETY: The interpreter is held, and the view is written before it is read.
        if unsafe { ffi::PyObject_GetBuffer(value.as_ptr(), &raw mut view, ffi::PyBUF_FORMAT) } != 0
        {
            return Err(PyErr::fetch(py));
        }
        let own = Self {
            view,
            py: PhantomData,
        };
        // SAFETY: A view that was asked for its format has it, until it is released.
        let format = unsafe { CStr::from_ptr(own.view.format) };
        let is_signed = matches!(format.to_bytes(), b"q" | b"l");
        Ok((is_signed && own.view.itemsize == 8).then_some(own))
    }

    fn values(&self) -> &[i64] {
        let count = usize::try_from(self.view.len).unwrap_or(0) / size_of::<i64>();
        if count == 0 {
            return &[];
        }
        // SAFETY: An array that is not empty has as many elements of this type, aligned, in memory that stays as long as the
        // view is open. Nobody writes to it meanwhile: this thread holds the interpreter, and calls nothing of it until the
        // last read.
        unsafe { std::slice::from_raw_parts(self.view.buf.cast(), count) }
    }
}

impl Drop for Longs<'_> {
    fn drop(&mut self) {
        // SAFETY: The view was opened, by this thread, which holds the interpreter.
        unsafe { ffi::PyBuffer_Release(&raw mut self.view) }
    }
}

pub(crate) fn signed_integers(
    value: &Bound<'_, PyAny>,
    limits: &RangeInclusive<i64>,
    arg: Arg,
) -> PyResult<Vec<i64>> {
    match Integers::open(value, arg)? {
        Integers::List(list) => list
            .iter()
            .enumerate()
            .map(|(at, item)| signed_object(&item, at, limits, arg))
            .collect(),
        Integers::Tuple(tuple) => tuple
            .iter()
            .enumerate()
            .map(|(at, item)| signed_object(&item, at, limits, arg))
            .collect(),
        Integers::Longs(array) => signed_array(array.values(), limits, arg),
        Integers::I64(array) => signed_array(array.as_slice()?, limits, arg),
        Integers::I32(array) => signed_array(array.as_slice()?, limits, arg),
        Integers::U32(array) => signed_array(array.as_slice()?, limits, arg),
        Integers::U64(array) => signed_array(array.as_slice()?, limits, arg),
    }
}

fn signed_array<T: Whole>(
    values: &[T],
    limits: &RangeInclusive<i64>,
    arg: Arg,
) -> PyResult<Vec<i64>> {
    let out: Vec<i64> = values.iter().map(|value| value.signed()).collect();
    match out.iter().position(|value| !limits.contains(value)) {
        None => Ok(out),
        Some(at) => Err(arg.limits_error(at, values[at].into(), limits)),
    }
}

fn signed_object(
    value: &Bound<'_, PyAny>,
    at: usize,
    limits: &RangeInclusive<i64>,
    arg: Arg,
) -> PyResult<i64> {
    if value.is_exact_instance_of::<PyInt>()
        && let Ok(number) = value.extract::<i64>()
        && limits.contains(&number)
    {
        return Ok(number);
    }
    let number = arg.int_at(at, value)?;
    match i64::try_from(number) {
        Ok(fitting) if limits.contains(&fitting) => Ok(fitting),
        _ => Err(arg.limits_error(at, number, limits)),
    }
}

pub(crate) fn count_list(value: &Bound<'_, PyAny>, arg: Arg) -> PyResult<Vec<usize>> {
    let counts = signed_integers(value, &(0..=i64::MAX), arg)?;
    // The map costs nothing: the numbers stay in place.
    Ok(counts
        .into_iter()
        .map(|count| usize::try_from(count).unwrap_or(usize::MAX))
        .collect())
}

/// Reads integers in `0..limit`; `limit` is at most 2³².
pub(crate) fn integers(value: &Bound<'_, PyAny>, limit: u64, arg: Arg) -> PyResult<Vec<u32>> {
    let integers = Integers::open(value, arg)?;
    integers.read(0..integers.len(), limit, arg)
}

/// Reads the first `count` integers of a list, or all of a shorter one, and leaves the others unread.
pub(crate) fn first_integers(
    value: &Bound<'_, PyAny>,
    count: usize,
    limit: u64,
    arg: Arg,
) -> PyResult<Vec<u32>> {
    let integers = Integers::open(value, arg)?;
    integers.read(0..integers.len().min(count), limit, arg)
}

pub(crate) fn block_ids(
    value: &Bound<'_, PyAny>,
    num_blocks: u64,
    arg: Arg,
) -> PyResult<Vec<kvtrie_core::BlockId>> {
    // The map costs nothing: the ids stay in place.
    Ok(integers(value, num_blocks, arg)?
        .into_iter()
        .map(kvtrie_core::BlockId)
        .collect())
}

fn read_objects<'py>(
    py: Python<'py>,
    range: Range<usize>,
    limit: u64,
    arg: Arg,
    get: impl Fn(usize) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Vec<u32>> {
    let mut out = Vec::with_capacity(range.len());
    for at in range {
        let value = get(at)?;
        let value = if value.is_exact_instance_of::<PyInt>() {
            value
                .extract::<i64>()
                .map(i128::from)
                .or_else(|_| int(&value))
        } else {
            int(&value)
        };
        let value = value.map_err(|error| arg.element_error(at, error, py))?;
        match u32::try_from(value) {
            Ok(fitting) if u64::from(fitting) < limit => out.push(fitting),
            _ => return Err(arg.range_error(at, value, limit)),
        }
    }
    Ok(out)
}

trait Whole: Element + Copy + Into<i128> {
    /// The value with its sign extended, so that a negative value becomes a very large one.
    fn wide(self) -> u64;

    /// The value as `i64`, or the nearest `i64`.
    fn signed(self) -> i64;

    /// The values as token ids, if they need no conversion.
    fn tokens(_values: &[Self]) -> Option<&[u32]> {
        None
    }
}

impl Whole for i64 {
    fn wide(self) -> u64 {
        self.cast_unsigned()
    }

    fn signed(self) -> i64 {
        self
    }
}

impl Whole for i32 {
    fn wide(self) -> u64 {
        i64::from(self).cast_unsigned()
    }

    fn signed(self) -> i64 {
        self.into()
    }
}

impl Whole for u32 {
    fn wide(self) -> u64 {
        self.into()
    }

    fn signed(self) -> i64 {
        self.into()
    }

    fn tokens(values: &[Self]) -> Option<&[u32]> {
        Some(values)
    }
}

impl Whole for u64 {
    fn wide(self) -> u64 {
        self
    }

    fn signed(self) -> i64 {
        i64::try_from(self).unwrap_or(i64::MAX)
    }
}

fn read_array<T: Whole>(
    array: &PyReadonlyArray1<'_, T>,
    range: Range<usize>,
    limit: u64,
    arg: Arg,
) -> PyResult<Vec<u32>> {
    let values = array.as_slice()?;
    match (T::tokens(values), limit) {
        (Some(tokens), TOKEN_IDS) => Ok(tokens[range].to_vec()),
        _ => narrow(&values[range.clone()], range.start, limit, arg),
    }
}

/// Converts values, of which the first is at position `first`. Each must be in `0..limit`.
fn narrow<T: Whole>(values: &[T], first: usize, limit: u64, arg: Arg) -> PyResult<Vec<u32>> {
    // One pass without branches becomes vector code. The search for the position runs only after a failure.
    let mut bits = 0;
    #[expect(
        clippy::cast_possible_truncation,
        reason = "what is cut off is found in the bits"
    )]
    let out: Vec<u32> = values
        .iter()
        .map(|value| {
            bits |= value.wide();
            value.wide() as u32
        })
        .collect();
    let is_below = |limit| out.iter().max().is_none_or(|&most| u64::from(most) < limit);
    if bits < TOKEN_IDS && (bits < limit || is_below(limit)) {
        return Ok(out);
    }
    let at = values.iter().position(|value| value.wide() >= limit);
    let at = at.unwrap_or(0);
    Err(arg.range_error(first + at, values[at].into(), limit))
}

fn array_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    ARRAY.import(py, "array", "array")
}

pub(crate) fn asarray<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = value.py();
    let asarray = ASARRAY.get_or_try_init(py, || {
        py.import("numpy")?.getattr("asarray").map(Bound::unbind)
    })?;
    asarray.bind(py).call1((value,))
}
