//! Copies of tensors that aren't contiguous, and conversions between dtypes.

use super::{Array, Cuda, Module, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, Tensor, bail};

static MODULE: Module = module!("copy");

const THREADS: usize = 256;
/// As in `kernel.cu`.
const DIMENSIONS: usize = 6;
const AHEAD: usize = 4;
const TILE: usize = 32;
const CAST_VECTOR: usize = 8;

/// The layout that `kernel.cu` reads.
#[repr(C)]
struct Layout {
    sizes: [i64; DIMENSIONS],
    strides: [i64; DIMENSIONS],
}

// SAFETY: it has the layout of the kernels' struct of that name.
unsafe impl DeviceRepr for Layout {}

/// Rows of two tensors as `write_rows` takes them.
#[repr(C)]
struct PlacedRows {
    from: [u64; 2],
    to: [u64; 2],
    token_strides: [i64; 2],
    head_strides: [i64; 2],
}

// SAFETY: it has the layout of the kernel's struct of that name.
unsafe impl DeviceRepr for PlacedRows {}

/// A dimension: its size and its stride.
type Dimension = (usize, usize);

/// The dimensions, with those that lie behind each other as one, and without those of size 1.
fn collapse(tensor: &Tensor) -> Vec<Dimension> {
    let mut out: Vec<Dimension> = Vec::new();
    for (size, stride) in tensor.dims().iter().copied().zip(tensor.stride().iter().copied()) {
        match out.last_mut() {
            _ if size == 1 => {}
            Some(last) if last.1 == size * stride => *last = (last.0 * size, stride),
            _ => out.push((size, stride)),
        }
    }
    out
}

/// The widest numbers, in bytes, that the elements can be copied as.
fn width(dimensions: &[Dimension], element: usize, address: u64) -> usize {
    let Some(((size, 1), outer)) = dimensions.split_last() else { return element };
    let fits = |width: &usize| {
        (size * element).is_multiple_of(*width)
            && address.is_multiple_of(*width as u64)
            && outer.iter().all(|(_, stride)| (stride * element).is_multiple_of(*width))
    };
    [16, 8, 4, 2].into_iter().filter(|width| *width > element).find(fits).unwrap_or(element)
}

impl Cuda<'_> {
    /// Writes rows `(tokens, heads, width)` of two tensors to their places `(tokens)` u32 in two contiguous
    /// tensors of `room` rows, all of one dtype of 2 or 4 bytes; those beyond are left out.
    pub(crate) fn write_rows_both(
        &self,
        rows: [&Array; 2],
        to: [&Array; 2],
        places: &Array,
        room: usize,
    ) -> Result<()> {
        const MOST_BLOCKS: usize = 1024;
        let (tokens, heads, width) = rows[0].tensor.dims3()?;
        let element = rows[0].dtype.size_in_bytes();
        let bytes = |index| rows.map(|rows| rows.tensor.stride()[index] * element);
        let (token_strides, head_strides) = (bytes(0), bytes(1));
        let fits = |pack: &usize| {
            let addresses = rows.iter().chain(&to).all(|array| array.pointer % *pack as u64 == 0);
            let strides = token_strides.iter().chain(&head_strides);
            addresses && strides.chain([&(width * element)]).all(|bytes| bytes % pack == 0)
        };
        let pack = [16, 8, 4, 2].into_iter().find(fits).unwrap_or(2);
        let name = match pack {
            2 => "write_rows_2",
            4 => "write_rows_4",
            8 => "write_rows_8",
            _ => "write_rows_16",
        };
        let packs = |bytes: usize| (bytes / pack) as i64;
        let width = packs(width * element);
        let count = tokens * heads * width as usize;
        let grid = (count.div_ceil(THREADS).min(MOST_BLOCKS) as u32, 2, 1);
        let launch = MODULE.launch(self, name, grid, THREADS as u32, 0)?.overlapping();
        let rows = PlacedRows {
            from: rows.map(|array| array.pointer),
            to: to.map(|array| array.pointer),
            token_strides: token_strides.map(packs),
            head_strides: head_strides.map(packs),
        };
        let (tokens, heads, room) = (tokens as i64, heads as i64, room as i64);
        // SAFETY: the rows are found by the strides of their tensors, and the kernel leaves out what has no room.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&rows).arg(&places.pointer).arg(&tokens).arg(&heads).arg(&width);
                arguments.arg(&room);
            })
        }
    }

    /// A contiguous copy.
    pub(crate) fn copy(&self, tensor: &Tensor) -> Result<Array> {
        let source = self.strided(tensor)?;
        let out = self.empty(tensor.shape(), source.dtype)?;
        let count = tensor.elem_count();
        if count == 0 {
            return Ok(out);
        }
        let element = source.dtype.size_in_bytes();
        let mut dimensions = collapse(tensor);
        let transposed = match *dimensions.as_slice() {
            [(rows, 1), (columns, stride)] => Some((1, 0, rows, columns, stride)),
            [(matrices, distance), (rows, 1), (columns, stride)] => {
                Some((matrices, distance, rows, columns, stride))
            }
            _ => None,
        };
        let name = match element {
            2 => "transpose_2",
            _ => "transpose_4",
        };
        if let Some((matrices, distance, rows, columns, stride)) = transposed
            && matches!(element, 2 | 4)
            && matrices <= 65_535
            && let Ok(tiles) = i32::try_from(rows.div_ceil(TILE) * columns.div_ceil(TILE))
        {
            let grid = (tiles as u32, 1, matrices as u32);
            let launch = MODULE.launch(self, name, grid, THREADS as u32, 0)?;
            let [rows, columns, stride, distance] =
                [rows, columns, stride, distance].map(|number| number as i64);
            // SAFETY: the kernel reads the elements of this layout and writes as many.
            unsafe {
                launch.with(|arguments| {
                    arguments.arg(&source.pointer).arg(&out.pointer).arg(&rows).arg(&columns);
                    arguments.arg(&stride).arg(&distance);
                })?;
            }
            return Ok(out);
        }
        let width = width(&dimensions, element, source.pointer);
        let factor = width / element;
        if factor > 1
            && let Some(((size, _), outer)) = dimensions.split_last_mut()
        {
            *size /= factor;
            outer.iter_mut().for_each(|(_, stride)| *stride /= factor);
        }
        let name = match width {
            1 => "copy_1",
            2 => "copy_2",
            4 => "copy_4",
            8 => "copy_8",
            _ => "copy_16",
        };
        let blocks = (count / factor).div_ceil(AHEAD * THREADS);
        let (Some(missing), Ok(blocks)) =
            (DIMENSIONS.checked_sub(dimensions.len()), i32::try_from(blocks))
        else {
            bail!(
                "metal-candle-kernels: a tensor with shape {:?} and strides {:?} cannot be made contiguous on CUDA",
                tensor.dims(),
                tensor.stride()
            )
        };
        let mut layout = Layout { sizes: [1; DIMENSIONS], strides: [0; DIMENSIONS] };
        for (index, (size, stride)) in dimensions.iter().enumerate() {
            layout.sizes[missing + index] = *size as i64;
            layout.strides[missing + index] = *stride as i64;
        }
        let count = (count / factor) as i64;
        let launch = MODULE.launch(self, name, (blocks as u32, 1, 1), THREADS as u32, 0)?;
        // SAFETY: as above, in numbers of `width` bytes.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&source.pointer).arg(&out.pointer).arg(&count).arg(&layout);
            })?;
        }
        Ok(out)
    }

    /// Contiguous elements in `dtype`, copied only if they aren't so already.
    pub(crate) fn contiguous_as(&self, tensor: &Tensor, dtype: DType) -> Result<Array> {
        self.cast(&self.strided(tensor)?, dtype)
    }

    /// Contiguous elements in another dtype: f32, bf16 or f16.
    fn cast(&self, array: &Array, dtype: DType) -> Result<Array> {
        let array = self.contiguous(&array.tensor)?;
        if array.dtype == dtype {
            return Ok(array);
        }
        let names = match (array.dtype, dtype) {
            (DType::F32, DType::BF16) => ("cast_f32_bf16", "cast_any_f32_bf16"),
            (DType::F32, DType::F16) => ("cast_f32_f16", "cast_any_f32_f16"),
            (DType::BF16, DType::F32) => ("cast_bf16_f32", "cast_any_bf16_f32"),
            (DType::BF16, DType::F16) => ("cast_bf16_f16", "cast_any_bf16_f16"),
            (DType::F16, DType::F32) => ("cast_f16_f32", "cast_any_f16_f32"),
            (DType::F16, DType::BF16) => ("cast_f16_bf16", "cast_any_f16_bf16"),
            (from, to) => bail!(
                "metal-candle-kernels: a {from:?} tensor cannot be converted to {to:?} on CUDA, expected F32, BF16 or F16"
            ),
        };
        let out = self.empty(array.tensor.shape(), dtype)?;
        let count = array.tensor.elem_count();
        let packed = array.pointer.is_multiple_of(16);
        let (name, vector) = if packed { (names.0, CAST_VECTOR) } else { (names.1, 1) };
        // The first block has what is left over, too.
        let blocks = (count / vector).div_ceil(THREADS).max(count.min(1));
        let Ok(blocks) = i32::try_from(blocks) else {
            bail!("metal-candle-kernels: {count} elements are too many for one launch")
        };
        let launch = MODULE.launch(self, name, (blocks as u32, 1, 1), THREADS as u32, 0)?;
        let count = count as i64;
        // SAFETY: both have so many elements.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&array.pointer).arg(&out.pointer).arg(&count);
            })?;
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::*;
    use candle_core::Device;

    type View<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_copies_any_layout() {
        let device = cuda();
        let context = Cuda::on(&device).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64, DType::U32, DType::U8] {
            for shape in [[3, 5, 7, 11], [2, 64, 3, 16], [4, 100, 2, 40]] {
                let base = ((random(&shape, 1) + 1.0).unwrap() * 100.0).unwrap();
                let base = base.to_dtype(dtype).unwrap();
                let on_device = base.to_device(&device).unwrap();
                let views: [View; 9] = [
                    &|t| t.transpose(1, 2),
                    &|t| t.transpose(2, 3),
                    &|t| t.transpose(0, 3),
                    &|t| t.permute((3, 2, 1, 0)),
                    &|t| t.narrow(3, 8, 3)?.narrow(1, 1, 3),
                    &|t| t.narrow(1, 1, 2)?.transpose(0, 2),
                    &|t| t.narrow(2, 1, 1)?.broadcast_as((shape[0], shape[1], 5, shape[3])),
                    &|t| t.reshape((shape[0] * shape[1], shape[2] * shape[3]))?.t(),
                    &|t| t.narrow(0, 1, 1)?.narrow(3, 0, 0),
                ];
                for view in views {
                    let expected = view(&base).unwrap().contiguous().unwrap();
                    let found = context.contiguous(&view(&on_device).unwrap()).unwrap().tensor;
                    assert!(found.is_contiguous());
                    assert_eq!(found.dims(), expected.dims());
                    if expected.elem_count() > 0 {
                        let found = found.to_device(&Device::Cpu).unwrap();
                        assert_identical(&found, &expected);
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_converts_like_the_cpu() {
        let device = cuda();
        let context = Cuda::on(&device).unwrap();
        let dtypes = [DType::F32, DType::BF16, DType::F16];
        for count in [1, 7, 8, 4099] {
            for from in dtypes {
                let base = random(&[count + 1], 1).to_dtype(from).unwrap();
                let on_device = base.to_device(&device).unwrap();
                for to in dtypes {
                    for start in [0, 1] {
                        let part = base.narrow(0, start, count).unwrap();
                        let array =
                            context.strided(&on_device.narrow(0, start, count).unwrap()).unwrap();
                        let found = context.cast(&array, to).unwrap().tensor;
                        let found = found.to_device(&Device::Cpu).unwrap();
                        assert_identical(&found, &part.to_dtype(to).unwrap());
                    }
                }
            }
        }
    }
}
