//! What the CPU operations share: element types and the types their sums are kept in, reading a
//! tensor's storage, matrix products with explicit strides, and parallel loops.
//!
//! Bits never depend on the number of threads: work is cut by fixed sizes taken from shapes alone,
//! every output element is written by one task, and sums run in a fixed order inside it.

use candle_core::{
    CpuStorage, DType, InplaceOp1, InplaceOp2, Layout, Result, Storage, StorageRef, Tensor,
    WithDType, bail,
};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::{Neg, Range};

/// A floating-point type that tensors are stored in.
pub(crate) trait Element: WithDType {
    /// The type that sums over such elements are kept in.
    type Acc: Real;
    /// Converts for arithmetic.
    fn widen(source: &[Self], target: &mut [Self::Acc]);
    /// Converts for storage, rounding to the nearest.
    fn narrow(source: &[Self::Acc], target: &mut [Self]);
    /// The mutable slice as it is, when storage and arithmetic use the same type.
    fn native_mut(slice: &mut [Self]) -> Option<&mut [Self::Acc]>;
}

/// The type that sums over `T`s are kept in.
pub(crate) type Sum<T> = <T as Element>::Acc;

/// A buffer for a result.
pub(crate) fn zeros<T: WithDType>(count: usize) -> Vec<T> {
    vec![T::from_f64(0.0); count]
}

/// A type that arithmetic is done in: f32, and f64 for references and checks.
pub(crate) trait Real: Element<Acc = Self> + Neg<Output = Self> {
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
    fn erf(self) -> Self;
    fn sqrt(self) -> Self;
    /// The numbers of a storage of this type, to be changed.
    fn storage_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    /// Reads a storage of any float type that is not wider than this one.
    fn values(storage: &CpuStorage) -> Option<Values<'_, Self>>;
}

impl Element for f32 {
    type Acc = f32;
    fn widen(source: &[f32], target: &mut [f32]) {
        target.copy_from_slice(source)
    }
    fn narrow(source: &[f32], target: &mut [f32]) {
        target.copy_from_slice(source)
    }
    fn native_mut(slice: &mut [f32]) -> Option<&mut [f32]> {
        Some(slice)
    }
}

impl Element for f64 {
    type Acc = f64;
    fn widen(source: &[f64], target: &mut [f64]) {
        target.copy_from_slice(source)
    }
    fn narrow(source: &[f64], target: &mut [f64]) {
        target.copy_from_slice(source)
    }
    fn native_mut(slice: &mut [f64]) -> Option<&mut [f64]> {
        Some(slice)
    }
}

impl Element for bf16 {
    type Acc = f32;
    fn widen(source: &[bf16], target: &mut [f32]) {
        for (target, source) in target.iter_mut().zip(source) {
            *target = bf16_to_f32(*source);
        }
    }
    fn narrow(source: &[f32], target: &mut [bf16]) {
        for (target, source) in target.iter_mut().zip(source) {
            // Round to nearest even without a branch, so that the loop vectorises.
            let bits = source.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            let quiet_nan = (bits >> 16) | 0x40;
            let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
            *target = bf16::from_bits(if is_nan { quiet_nan } else { rounded } as u16);
        }
    }
    fn native_mut(_: &mut [bf16]) -> Option<&mut [f32]> {
        None
    }
}

impl Element for f16 {
    type Acc = f32;
    fn widen(source: &[f16], target: &mut [f32]) {
        source.convert_to_f32_slice(target)
    }
    fn narrow(source: &[f32], target: &mut [f16]) {
        target.convert_from_f32_slice(source)
    }
    fn native_mut(_: &mut [f16]) -> Option<&mut [f32]> {
        None
    }
}

#[inline(always)]
fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits((value.to_bits() as u32) << 16)
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;
    #[inline(always)]
    fn exp(self) -> f32 {
        exp_f32(self)
    }
    fn ln(self) -> f32 {
        f32::ln(self)
    }
    fn tanh(self) -> f32 {
        f32::tanh(self)
    }
    fn erf(self) -> f32 {
        candle_core::cpu::erf::erf_f32(self)
    }
    #[inline(always)]
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }
    fn storage_mut(storage: &mut CpuStorage) -> Option<&mut [f32]> {
        match storage {
            CpuStorage::F32(values) => Some(values),
            _ => None,
        }
    }
    fn values(storage: &CpuStorage) -> Option<Values<'_, f32>> {
        match storage {
            CpuStorage::F32(values) => Some(Values::Native(values)),
            CpuStorage::BF16(values) => Some(Values::Bf16(values)),
            CpuStorage::F16(values) => Some(Values::F16(values)),
            _ => None,
        }
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;
    fn exp(self) -> f64 {
        f64::exp(self)
    }
    fn ln(self) -> f64 {
        f64::ln(self)
    }
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }
    fn erf(self) -> f64 {
        candle_core::cpu::erf::erf_f64(self)
    }
    #[inline(always)]
    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }
    fn storage_mut(storage: &mut CpuStorage) -> Option<&mut [f64]> {
        match storage {
            CpuStorage::F64(values) => Some(values),
            _ => None,
        }
    }
    fn values(storage: &CpuStorage) -> Option<Values<'_, f64>> {
        match storage {
            CpuStorage::F64(values) => Some(Values::Native(values)),
            CpuStorage::F32(values) => Some(Values::F32(values)),
            CpuStorage::BF16(values) => Some(Values::Bf16(values)),
            CpuStorage::F16(values) => Some(Values::F16(values)),
            _ => None,
        }
    }
}

/// `e^x` within 2 units in the last place, without branches or calls so that loops vectorise.
/// Below -86 (4.5e-38) the result is 0.
///
/// `x = n·ln 2 + r` with `|r| <= ln 2 / 2`, so `e^x = 2^n·e^r`; the polynomial is that of the
/// Cephes library (Moshier).
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn exp_f32(x: f32) -> f32 {
    const LOW: f32 = -86.0;
    const HIGH: f32 = 88.8;
    // Adding 1.5·2^23 rounds to an integer and leaves it in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x < LOW { LOW } else { x };
    let clamped = if clamped > HIGH { HIGH } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * 0.693_359_375 + n * 2.121_944_40e-4;
    let mut p = 1.987_569_150_0e-4;
    p = p * r + 1.398_199_950_7e-3;
    p = p * r + 8.333_451_907_3e-3;
    p = p * r + 4.166_579_589_4e-2;
    p = p * r + 1.666_666_545_9e-1;
    p = p * r + 5.000_000_120_1e-1;
    let fraction = p * (r * r) + r + 1.0;
    // 2^(n-1) first: 2^128 has no f32, twice 2^127 overflows to infinity as it should.
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_sub(1) << 23;
    let scaled = f32::from_bits(fraction.to_bits().wrapping_add(exponent)) * 2.0;
    let scaled = if x < LOW { 0.0 } else { scaled };
    if x.is_nan() { x } else { scaled }
}

/// Stored numbers that are read as `A`, whatever their storage type.
#[derive(Clone, Copy)]
pub(crate) enum Values<'a, A> {
    Native(&'a [A]),
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a, A: Real> Values<'a, A> {
    pub(crate) fn slice(self, range: Range<usize>) -> Values<'a, A> {
        match self {
            Values::Native(values) => Values::Native(&values[range]),
            Values::F32(values) => Values::F32(&values[range]),
            Values::Bf16(values) => Values::Bf16(&values[range]),
            Values::F16(values) => Values::F16(&values[range]),
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Values::Native(values) => values.len(),
            Values::F32(values) => values.len(),
            Values::Bf16(values) => values.len(),
            Values::F16(values) => values.len(),
        }
    }

    /// Copies `target.len()` numbers from `start` on.
    pub(crate) fn read(self, start: usize, target: &mut [A]) {
        let range = start..start + target.len();
        match self {
            Values::Native(values) => target.copy_from_slice(&values[range]),
            Values::F32(values) => {
                for (target, value) in target.iter_mut().zip(&values[range]) {
                    *target = A::from_f64(*value as f64);
                }
            }
            Values::Bf16(values) => widen_half(&values[range], target),
            Values::F16(values) => widen_half(&values[range], target),
        }
    }

    /// The numbers of `range`: borrowed when they are stored as `A`, else converted into `scratch`.
    pub(crate) fn block<'b>(self, range: Range<usize>, scratch: &'b mut Vec<A>) -> &'b [A]
    where
        'a: 'b,
    {
        match self {
            Values::Native(values) => &values[range],
            _ => {
                scratch.resize(range.len(), A::ZERO);
                let start = range.start;
                for_each_chunk(scratch, PARALLEL_CHUNK, |index, chunk| {
                    self.read(start + index * PARALLEL_CHUNK, chunk)
                });
                scratch
            }
        }
    }

    /// All numbers, converted.
    pub(crate) fn to_vec(self) -> Vec<A> {
        let mut target = vec![A::ZERO; self.len()];
        self.read(0, &mut target);
        target
    }

    /// The dot product of `x` with the numbers from `start` on, in a fixed order.
    pub(crate) fn dot(self, start: usize, x: &[A], scratch: &mut Vec<A>) -> A {
        let range = start..start + x.len();
        match self {
            Values::Native(values) => dot(&values[range], x),
            other => {
                scratch.resize(x.len(), A::ZERO);
                other.read(start, scratch);
                dot(scratch, x)
            }
        }
    }
}

/// Converts half-precision numbers to f32, or by way of f32 to f64.
fn widen_half<H: Element<Acc = f32>, A: Real>(source: &[H], target: &mut [A]) {
    if let Some(target) = as_f32_mut(target) {
        H::widen(source, target);
        return;
    }
    let mut buffer = [0f32; 64];
    for (target, source) in target.chunks_mut(64).zip(source.chunks(64)) {
        let buffer = &mut buffer[..source.len()];
        H::widen(source, buffer);
        for (target, value) in target.iter_mut().zip(buffer) {
            *target = A::from_f64(*value as f64);
        }
    }
}

fn as_f32_mut<A: Real>(slice: &mut [A]) -> Option<&mut [f32]> {
    if A::DTYPE == DType::F32 {
        // SAFETY: f32 is the only type with this DTYPE constant that implements `Real`.
        Some(unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), slice.len()) })
    } else {
        None
    }
}

/// The dot product, summed over 32 lanes so that it vectorises, in an order given by the length alone.
#[inline]
pub(crate) fn dot<A: Real>(a: &[A], b: &[A]) -> A {
    const LANES: usize = 32;
    let mut lanes = [A::ZERO; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let mut tail = A::ZERO;
    for (a, b) in a_chunks.remainder().iter().zip(b_chunks.remainder()) {
        tail += *a * *b;
    }
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    sum_lanes(lanes) + tail
}

/// The sum, in an order given by the length alone.
#[inline]
pub(crate) fn sum<A: Real>(values: &[A]) -> A {
    const LANES: usize = 32;
    let mut lanes = [A::ZERO; LANES];
    let chunks = values.chunks_exact(LANES);
    let mut tail = A::ZERO;
    for value in chunks.remainder() {
        tail += *value;
    }
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += chunk[lane];
        }
    }
    sum_lanes(lanes) + tail
}

fn sum_lanes<A: Real>(mut lanes: [A; 32]) -> A {
    let mut width = 16;
    while width > 0 {
        for lane in 0..width {
            let other = lanes[lane + width];
            lanes[lane] += other;
        }
        width /= 2;
    }
    lanes[0]
}

/// Runs `$body` with the type `$element` standing for the stored type of dtype `$dtype`.
macro_rules! dispatch {
    ($operation:expr, $dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $element = f32;
                $body
            }
            candle_core::DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $element = half::f16;
                $body
            }
            candle_core::DType::F64 => {
                type $element = f64;
                $body
            }
            other => candle_core::bail!(
                "metal-candle-kernels: {} does not support {other:?} tensors, expected F32, BF16, F16 or F64",
                $operation
            ),
        }
    };
}
pub(crate) use dispatch;

/// A CPU tensor made ready to be read: contiguous unless asked otherwise.
pub(crate) struct Input(Tensor);

impl Input {
    /// Copies only when the tensor isn't contiguous.
    pub(crate) fn contiguous(tensor: &Tensor) -> Result<Input> {
        Ok(Input(tensor.detach().contiguous()?))
    }

    /// Copies only when the last dimension isn't contiguous; the others keep their strides.
    pub(crate) fn strided_rows(tensor: &Tensor) -> Result<Input> {
        match (tensor.stride().last(), tensor.dims().last()) {
            (Some(stride), Some(size)) if *stride == 1 || *size <= 1 => Ok(Input(tensor.detach())),
            _ => Self::contiguous(tensor),
        }
    }

    pub(crate) fn read(&self) -> Read<'_> {
        let (storage, layout) = self.0.storage_and_layout();
        Read { storage, layout }
    }
}

/// A tensor's storage, locked for reading.
pub(crate) struct Read<'a> {
    storage: StorageRef<'a>,
    pub(crate) layout: &'a Layout,
}

impl Read<'_> {
    fn cpu(&self) -> Result<&CpuStorage> {
        match &*self.storage {
            Storage::Cpu(storage) => Ok(storage),
            _ => bail!(
                "metal-candle-kernels: the CPU operation was given a tensor that is elsewhere"
            ),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.storage.dtype()
    }

    /// The elements of a contiguous tensor.
    pub(crate) fn slice<T: WithDType>(&self) -> Result<&[T]> {
        contiguous_slice(self.cpu()?, self.layout)
    }

    /// The elements of a contiguous tensor, to be read as `A`.
    pub(crate) fn values<A: Real>(&self) -> Result<Values<'_, A>> {
        let (start, end) = contiguous_range(self.layout)?;
        Ok(storage_values(self.cpu()?)?.slice(start..end))
    }

    /// The whole storage, to be read as `A` through the layout's offset and strides.
    pub(crate) fn storage_values<A: Real>(&self) -> Result<Values<'_, A>> {
        storage_values(self.cpu()?)
    }
}

fn contiguous_range(layout: &Layout) -> Result<(usize, usize)> {
    match layout.contiguous_offsets() {
        Some(range) => Ok(range),
        None => bail!("metal-candle-kernels: expected a contiguous tensor, found {layout:?}"),
    }
}

pub(crate) fn contiguous_slice<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<&'a [T]> {
    let (start, end) = contiguous_range(layout)?;
    Ok(&storage.as_slice::<T>()?[start..end])
}

pub(crate) fn contiguous_values<'a, A: Real>(
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<Values<'a, A>> {
    let (start, end) = contiguous_range(layout)?;
    Ok(storage_values(storage)?.slice(start..end))
}

pub(crate) fn storage_values<A: Real>(storage: &CpuStorage) -> Result<Values<'_, A>> {
    use candle_core::backend::BackendStorage;
    match A::values(storage) {
        Some(values) => Ok(values),
        None => bail!(
            "metal-candle-kernels: a {:?} tensor cannot be combined with tensors computed in {:?}",
            storage.dtype(),
            A::DTYPE
        ),
    }
}

/// Rows, elements in a row and distance between rows of a layout whose last dimension is contiguous
/// and whose leading ones collapse into one: a contiguous tensor or a narrowed last dimension.
pub(crate) fn collapsed_rows(layout: &Layout) -> Option<(usize, usize, usize)> {
    let (columns, leading) = layout.dims().split_last()?;
    let (last_stride, strides) = layout.stride().split_last()?;
    if *last_stride != 1 && *columns > 1 {
        return None;
    }
    let mut rows = 1;
    let mut row_stride = None;
    for (size, stride) in leading.iter().zip(strides).rev() {
        if *size != 1 {
            let first = *row_stride.get_or_insert(*stride);
            if *stride != first * rows {
                return None;
            }
        }
        rows *= size;
    }
    Some((rows, *columns, row_stride.unwrap_or(*columns)))
}

/// Lets `compute` fill `out`: in place when it is stored as it is computed, else through `scratch`.
pub(crate) fn write_through<T: Element>(
    out: &mut [T],
    scratch: &mut Vec<T::Acc>,
    compute: impl FnOnce(&mut [T::Acc]),
) {
    match T::native_mut(out) {
        Some(out) => compute(out),
        None => {
            scratch.resize(out.len(), T::Acc::ZERO);
            compute(scratch);
            T::narrow(scratch, out);
        }
    }
}

/// Lets `change` work on the numbers of a contiguous tensor in place.
pub(crate) fn change_in_place<A: Real>(
    operation: &'static str,
    tensor: &Tensor,
    change: impl FnOnce(&mut [A]) -> Result<()>,
) -> Result<()> {
    struct Change<A, F> {
        operation: &'static str,
        change: Cell<Option<F>>,
        element: PhantomData<A>,
    }
    impl<A: Real, F: FnOnce(&mut [A]) -> Result<()>> InplaceOp1 for Change<A, F> {
        fn name(&self) -> &'static str {
            self.operation
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let (start, end) = contiguous_range(layout)?;
            match (A::storage_mut(storage), self.change.take()) {
                (Some(values), Some(change)) => change(&mut values[start..end]),
                _ => bail!(
                    "metal-candle-kernels: {}: expected {:?} numbers to change in place",
                    self.operation,
                    A::DTYPE
                ),
            }
        }
    }
    tensor.inplace_op1(&Change {
        operation,
        change: Cell::new(Some(change)),
        element: PhantomData::<A>,
    })
}

/// An error when two tensors share storage: locking both for change would never return.
pub(crate) fn require_separate(
    operation: &'static str,
    names: &str,
    a: &Tensor,
    b: &Tensor,
) -> Result<()> {
    struct Nothing(&'static str);
    impl InplaceOp2 for Nothing {
        fn name(&self) -> &'static str {
            self.0
        }
        fn cpu_fwd(
            &self,
            _: &mut CpuStorage,
            _: &Layout,
            _: &CpuStorage,
            _: &Layout,
        ) -> Result<()> {
            Ok(())
        }
    }
    // Candle keeps the identity of a storage to itself, but refuses such pairs before it locks them.
    if let Err(error) = a.inplace_op2(b, &Nothing(operation)) {
        bail!(
            "metal-candle-kernels: {operation}: {names} must be tensors of their own, with every element stored once ({error})"
        )
    }
    Ok(())
}

/// A mutable slice that tasks write to at places that don't overlap.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `slice`, whose callers promise that ranges don't overlap.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// # Safety
    /// No two slices that are alive at the same time may overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "disjoint slice out of bounds");
        // SAFETY: in bounds as checked, and the caller promises that nothing overlaps.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// Elements of one parallel task in element-wise loops: enough to be worth handing to a thread.
pub(crate) const PARALLEL_CHUNK: usize = 16 * 1024;

/// Rows of one parallel task when a row has `columns` elements.
pub(crate) fn rows_per_task(columns: usize) -> usize {
    (PARALLEL_CHUNK / columns.max(1)).max(1)
}

/// Calls `task(index, chunk)` for every chunk of `chunk_len` elements, on threads when there are several.
pub(crate) fn for_each_chunk<T: Send>(
    out: &mut [T],
    chunk_len: usize,
    task: impl Fn(usize, &mut [T]) + Sync,
) {
    let chunk_len = chunk_len.max(1);
    if out.len() <= chunk_len {
        if !out.is_empty() {
            task(0, out);
        }
    } else {
        out.par_chunks_mut(chunk_len).enumerate().for_each(|(index, chunk)| task(index, chunk));
    }
}

/// Like [`for_each_chunk`] over two outputs cut into the same number of chunks.
pub(crate) fn for_each_chunk2<T: Send, U: Send>(
    first: &mut [T],
    first_len: usize,
    second: &mut [U],
    second_len: usize,
    task: impl Fn(usize, &mut [T], &mut [U]) + Sync,
) {
    let (first_len, second_len) = (first_len.max(1), second_len.max(1));
    if first.len() <= first_len {
        if !first.is_empty() {
            task(0, first, second);
        }
    } else {
        first
            .par_chunks_mut(first_len)
            .zip(second.par_chunks_mut(second_len))
            .enumerate()
            .for_each(|(index, (first, second))| task(index, first, second));
    }
}

/// Calls `task(index)` for `0..count`, on threads when `parallel`.
pub(crate) fn for_each_index(count: usize, parallel: bool, task: impl Fn(usize) + Sync + Send) {
    if parallel && count > 1 {
        (0..count).into_par_iter().for_each(task);
    } else {
        (0..count).for_each(task);
    }
}

/// Adds the rows of `(rows, columns)` in order: one task a block of columns.
pub(crate) fn sum_rows<A: Real>(
    rows: usize,
    columns: usize,
    out: &mut [A],
    read_row: impl Fn(usize, Range<usize>, &mut [A]) + Sync,
) {
    let block = if rows * columns <= PARALLEL_CHUNK { columns } else { 128 };
    for_each_chunk(out, block, |index, out| {
        let mut scratch = vec![A::ZERO; out.len()];
        let start = index * block;
        for row in 0..rows {
            read_row(row, start..start + out.len(), &mut scratch);
            for (out, value) in out.iter_mut().zip(&scratch) {
                *out += *value;
            }
        }
    });
}

/// A matrix inside a slice, with strides in elements.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, A> {
    data: &'a [A],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, A> Matrix<'a, A> {
    /// Rows that start `row_stride` apart, their elements next to each other.
    pub(crate) fn new(data: &'a [A], rows: usize, columns: usize, row_stride: usize) -> Self {
        check_bounds(data.len(), rows, columns, row_stride);
        Matrix { data, rows, columns, row_stride, column_stride: 1 }
    }

    pub(crate) fn transpose(self) -> Self {
        Matrix {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

/// A matrix inside a mutable slice.
pub(crate) struct MatrixMut<'a, A> {
    data: &'a mut [A],
    rows: usize,
    columns: usize,
    row_stride: usize,
}

impl<'a, A> MatrixMut<'a, A> {
    pub(crate) fn new(data: &'a mut [A], rows: usize, columns: usize, row_stride: usize) -> Self {
        check_bounds(data.len(), rows, columns, row_stride);
        MatrixMut { data, rows, columns, row_stride }
    }
}

fn check_bounds(len: usize, rows: usize, columns: usize, row_stride: usize) {
    assert!(
        rows == 0 || columns == 0 || (rows - 1) * row_stride + columns <= len,
        "a {rows} x {columns} matrix with row stride {row_stride} does not fit in {len} elements"
    );
}

/// Whether a product is computed by the calling thread or by all.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Threads {
    One,
    All,
}

/// `out = scale·lhs·rhs`, added to `out` when `accumulate`.
pub(crate) fn multiply<A: Real>(
    out: MatrixMut<A>,
    accumulate: bool,
    lhs: Matrix<A>,
    rhs: Matrix<A>,
    scale: A,
    threads: Threads,
) {
    assert!(
        lhs.rows == out.rows && rhs.columns == out.columns && lhs.columns == rhs.rows,
        "a {} x {} by {} x {} product does not give {} x {}",
        lhs.rows,
        lhs.columns,
        rhs.rows,
        rhs.columns,
        out.rows,
        out.columns
    );
    let parallelism = match threads {
        Threads::One => gemm::Parallelism::None,
        Threads::All => match rayon::current_num_threads() {
            1 => gemm::Parallelism::None,
            count => gemm::Parallelism::Rayon(count),
        },
    };
    // SAFETY: the constructors checked that every element lies inside its slice, the output is
    // borrowed mutably so it overlaps no input, and the sizes match.
    unsafe {
        gemm::gemm(
            out.rows,
            out.columns,
            lhs.columns,
            out.data.as_mut_ptr(),
            1,
            out.row_stride as isize,
            accumulate,
            lhs.data.as_ptr(),
            lhs.column_stride as isize,
            lhs.row_stride as isize,
            rhs.data.as_ptr(),
            rhs.column_stride as isize,
            rhs.row_stride as isize,
            A::ONE,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut x = -86.0f32;
        while x < 88.7 {
            let exact = (x as f64).exp();
            let error = ((exp_f32(x) as f64 - exact) / exact).abs();
            assert!(error < 2.5e-7, "exp({x}) is off by {error:e}");
            x += 0.0137;
        }
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32(-100.0), 0.0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp_f32(89.0), f32::INFINITY);
        assert!(exp_f32(f32::NAN).is_nan());
    }

    #[test]
    fn bf16_rounds_as_half_does() {
        let mut bits = 1u32;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(bits);
            let mut ours = [bf16::ZERO];
            bf16::narrow(&[value], &mut ours);
            assert_eq!(ours[0].to_bits(), bf16::from_f32(value).to_bits(), "{value}");
        }
    }

    #[test]
    fn dot_and_sum_take_any_length() {
        for len in [0, 1, 31, 32, 33, 64, 100] {
            let a: Vec<f64> = (0..len).map(|i| i as f64).collect();
            let exact: f64 = a.iter().map(|a| a * a).sum();
            assert_eq!(dot(&a, &a), exact);
            assert_eq!(sum(&a), a.iter().sum::<f64>());
        }
    }
}
