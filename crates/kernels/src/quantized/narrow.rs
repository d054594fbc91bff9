//! Some rows or columns of a matrix in fewer bits, with the numbers that they have in the whole.

use super::{BLOCK, NESTED, OPERATION, Quantized, Scales};
use candle_core::{Device, Result, Tensor, bail};
use std::ops::Range;

/// Neighbouring elements of the whole matrix.
type Span = Range<usize>;

impl Quantized {
    /// Of a matrix on the CPU the outputs (`dim` 0) or inputs (`dim` 1) in `ranges`, one after the other. They keep their
    /// codes. Where they don't begin and end with groups, groups become shorter; and where groups no longer have their
    /// place in [`Scales::Nested`], their scales become f32.
    ///
    /// # Errors
    /// When a range isn't within the matrix or begins or ends within a byte of codes or a block of [`Scales::Blocks`],
    /// and when the matrix is on another device.
    pub fn narrow(&self, dim: usize, ranges: &[Range<usize>]) -> Result<Self> {
        let (outer, inner) = self.shape;
        if !self.device().is_cpu() {
            bail!(
                "metal-candle-kernels: {OPERATION}: cannot narrow a matrix on {:?}",
                self.device()
            )
        }
        let size = match dim {
            0 => outer,
            1 => inner,
            _ => bail!("metal-candle-kernels: {OPERATION}: narrow: dim is {dim}, expected 0 or 1"),
        };
        if let Some(range) =
            ranges.iter().find(|range| range.start >= range.end || range.end > size)
        {
            bail!("metal-candle-kernels: {OPERATION}: narrow: {range:?} is not within {size}")
        }
        let length = ranges.iter().map(ExactSizeIterator::len).sum();
        let (shape, spans): (_, Vec<Span>) = match dim {
            0 => (
                (length, inner),
                ranges.iter().map(|it| it.start * inner..it.end * inner).collect(),
            ),
            _ => {
                let of_row =
                    |row| ranges.iter().map(move |it| row * inner + it.start..row * inner + it.end);
                ((outer, length), (0..outer).flat_map(of_row).collect())
            }
        };
        // Of a whole group that no boundary lies in, counted from the beginning and from that of what is left.
        let mut group = self.group;
        let mut before = 0;
        for span in &spans {
            group = [span.start, span.len(), before].into_iter().fold(group, gcd);
            before += span.len();
        }
        let bits = self.levels.bits();
        if spans.iter().any(|span| {
            !(span.start * bits).is_multiple_of(8) || !(span.len() * bits).is_multiple_of(8)
        }) {
            bail!(
                "metal-candle-kernels: {OPERATION}: narrow: {ranges:?} of {size} begin or end within a byte, as {:?} has codes of {bits} bits",
                self.shape
            )
        }
        let codes = self.codes.to_vec1::<u8>()?;
        let codes: Vec<u8> = spans
            .iter()
            .flat_map(|span| &codes[span.start * bits / 8..span.end * bits / 8])
            .copied()
            .collect();
        let groups = places(&spans, self.group, group)?;
        let scales = self.scales.narrow(&spans, (self.group, group), &groups)?;
        let narrowed =
            Self::new(shape, self.levels, group, Tensor::new(codes, &Device::Cpu)?, scales)?;
        Ok(narrowed.with_arithmetic(self.arithmetic))
    }
}

impl Scales {
    /// Those of groups that were of the first size and are of the second: for each its `places` before.
    fn narrow(
        &self,
        spans: &[Span],
        (before, group): (usize, usize),
        places: &Tensor,
    ) -> Result<Self> {
        let select = |tensor: &Tensor| tensor.index_select(places, 0);
        Ok(match self {
            Self::Plain { scales, offsets } => Self::Plain {
                scales: select(scales)?,
                offsets: offsets.as_ref().map(select).transpose()?,
            },
            Self::E8m0(scales) => Self::E8m0(select(scales)?),
            Self::E4m3 { scales, overall } => {
                Self::E4m3 { scales: select(scales)?, overall: *overall }
            }
            Self::Nested { codes, table, scales, offset } => {
                let nested = NESTED * group;
                let ends = spans.len().saturating_sub(1);
                let is_whole = |(index, span): (usize, &Span)| {
                    span.start.is_multiple_of(nested)
                        && (index == ends || span.len().is_multiple_of(nested))
                };
                let codes = select(codes)?;
                if before == group && spans.iter().enumerate().all(is_whole) {
                    let scales = scales.index_select(&places_of_blocks(spans, nested)?, 0)?;
                    Self::Nested { codes, table: table.clone(), scales, offset: *offset }
                } else {
                    let (table, scales) = (table.to_vec1::<f32>()?, scales.to_vec1::<f32>()?);
                    let places = places.to_vec1::<u32>()?;
                    let decoded =
                        codes.to_vec1::<u8>()?.into_iter().zip(places).map(|(code, place)| {
                            table[usize::from(code)] * scales[place as usize / NESTED] + offset
                        });
                    let decoded: Vec<f32> = decoded.collect();
                    Self::Plain { scales: Tensor::new(decoded, &Device::Cpu)?, offsets: None }
                }
            }
            Self::Blocks { scales, signed, large, offsets } => {
                let is_whole = |span: &Span| {
                    span.start.is_multiple_of(BLOCK) && span.len().is_multiple_of(BLOCK)
                };
                if !spans.iter().all(is_whole) {
                    bail!(
                        "metal-candle-kernels: {OPERATION}: narrow: what is left begins or ends within a block of {BLOCK}"
                    )
                }
                let blocks = places_of_blocks(spans, BLOCK)?;
                Self::Blocks {
                    scales: select(scales)?,
                    signed: *signed,
                    large: large.index_select(&blocks, 0)?,
                    offsets: match offsets {
                        Some((offsets, large)) => {
                            Some((select(offsets)?, large.index_select(&blocks, 0)?))
                        }
                        None => None,
                    },
                }
            }
        })
    }
}

/// Of each group of `group` elements within the spans, the place of that of `before` elements that it is a part of: u32.
fn places(spans: &[Span], before: usize, group: usize) -> Result<Tensor> {
    let starts = spans.iter().flat_map(|span| span.clone().step_by(group));
    let places =
        starts.map(|start| u32::try_from(start / before).map_err(candle_core::Error::wrap));
    Tensor::new(places.collect::<Result<Vec<_>>>()?, &Device::Cpu)
}

/// The places of blocks of so many elements, with each of which a span begins.
fn places_of_blocks(spans: &[Span], block: usize) -> Result<Tensor> {
    places(spans, block, block)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;
    use crate::quantized::{Format, quantize};
    use crate::testing::*;
    use candle_core::DType;

    fn numbers(matrix: &Quantized) -> Tensor {
        matrix.dequantize(DType::F32).unwrap()
    }

    #[test]
    fn what_is_left_has_the_numbers_that_it_had() {
        let dense = random(&[24, 1024], 7).to_dtype(DType::F32).unwrap();
        let formats = [
            Format::Nf4 { block: 64, nested: true },
            Format::Nf4 { block: 64, nested: false },
            Format::Fp4 { block: 128, nested: true },
            Format::Affine { bits: 3, group: 32 },
            Format::Affine { bits: 4, group: 64 },
            Format::Affine { bits: 6, group: 128 },
            Format::Mxfp4,
            Format::Mxfp8,
            Format::Nvfp4,
            Format::Q4_0,
            Format::Q5_1,
            Format::Q8_0,
            Format::Q4K,
            Format::Q6K,
            Format::Int8Rows,
            Format::Fp8Rows,
            Format::Fp8Blocks,
        ];
        for format in formats {
            let whole = quantize(&dense, format).unwrap();
            let expected = numbers(&whole);
            let cases: [(usize, &[Range<usize>]); 6] = [
                (0, &[0..12]),
                (0, &[16..24]),
                (0, &[2..3, 8..9, 23..24]),
                (1, &[0..512]),
                (1, &[768..1024]),
                (1, &[256..512, 768..1024]),
            ];
            for (dim, ranges) in cases {
                let found = whole.narrow(dim, ranges).unwrap();
                let parts: Vec<_> = ranges
                    .iter()
                    .map(|it| expected.narrow(dim, it.start, it.len()).unwrap())
                    .collect();
                let expected = Tensor::cat(&parts, dim).unwrap();
                assert_eq!(found.shape(), expected.dims2().unwrap());
                assert_eq!(found.arithmetic(), whole.arithmetic());
                assert_identical(&numbers(&found), &expected);
            }
        }
    }

    #[test]
    fn groups_that_are_cut_become_shorter() {
        let dense = random(&[8, 192], 3).to_dtype(DType::F32).unwrap();
        let whole = quantize(&dense, Format::Nf4 { block: 128, nested: false }).unwrap();
        // A group of 128 goes on in the next row.
        let found = whole.narrow(1, &[0..96]).unwrap();
        assert_eq!(found.group(), 32);
        assert_identical(
            &numbers(&found),
            &numbers(&whole).narrow(1, 0, 96).unwrap().contiguous().unwrap(),
        );
        let scales =
            Scales::Plain { scales: Tensor::new(&[0.5f32], &Device::Cpu).unwrap(), offsets: None };
        let levels = crate::quantized::Levels::E4m3;
        let one = Quantized::new(
            (4, 16),
            levels,
            64,
            Tensor::new(vec![0x38u8; 64], &Device::Cpu).unwrap(),
            scales,
        );
        let found = one.unwrap().narrow(1, &[8..16]).unwrap();
        assert_eq!((found.shape(), found.group()), ((4, 8), 8));
        assert_eq!(numbers(&found).flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0.5; 32]);
    }

    #[test]
    fn what_cannot_be_cut_says_so() {
        let dense = random(&[4, 512], 3).to_dtype(DType::F32).unwrap();
        let q4k = quantize(&dense, Format::Q4K).unwrap();
        let wrong = message(q4k.narrow(1, &[0..128]));
        assert!(wrong.contains("within a block of 256"), "{wrong}");
        let wrong = message(q4k.narrow(0, &[2..5]));
        assert!(wrong.contains("2..5 is not within 4"), "{wrong}");
        let wrong = message(q4k.narrow(2, &[0..1]));
        assert!(wrong.contains("expected 0 or 1"), "{wrong}");
        let nf4 = quantize(&dense, Format::Nf4 { block: 64, nested: false }).unwrap();
        let wrong = message(nf4.narrow(1, &[1..64]));
        assert!(wrong.contains("within a byte"), "{wrong}");
    }
}
