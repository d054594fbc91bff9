//! NF4 and FP4 of bitsandbytes 0.50, as its CPU build makes them.
//!
//! A block's scale is its largest magnitude; an element becomes the level next to `x · (1 / scale)`. With double
//! quantisation the scales less their mean become codes of 8 bits in blocks of 256, by a table of 65 536 steps.

use super::super::{FP4, Levels, NESTED, NF4, OPERATION, Quantized, Scales};
use super::{Source, bytes_tensor, f32_tensor, largest};
use candle_core::{Result, bail};

/// The smallest scale that is divided by.
const SMALLEST: f32 = 1e-38;

/// FP4's codes in the order of their levels, of which two are 0.
const FP4_ORDER: [u8; 16] = [11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3];
const NF4_ORDER: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

pub(super) fn nf4(source: &Source, block: usize, nested: bool) -> Result<Quantized> {
    quantize(source, &NF4, &NF4_ORDER, block, nested)
}

pub(super) fn fp4(source: &Source, block: usize, nested: bool) -> Result<Quantized> {
    quantize(source, &FP4, &FP4_ORDER, block, nested)
}

fn quantize(
    source: &Source,
    table: &'static [f32; 16],
    order: &[u8; 16],
    block: usize,
    nested: bool,
) -> Result<Quantized> {
    if block == 0 || block % 2 == 1 {
        bail!(
            "metal-candle-kernels: {OPERATION}: blocks of {block} elements, expected an even number"
        )
    }
    let mut bounds = [0f32; 15];
    for (bound, pair) in bounds.iter_mut().zip(order.windows(2)) {
        *bound = (table[usize::from(pair[0])] + table[usize::from(pair[1])]) / 2.0;
    }
    let (codes, scales) = source.units(
        block,
        4,
        #[inline(always)]
        |_, numbers, codes| {
            let (largest, whole) = (largest(numbers), numbers.len() == block);
            let divisor = largest.max(SMALLEST);
            let reciprocal = 1.0 / divisor;
            for (number, code) in numbers.iter().zip(codes.iter_mut()) {
                // The last block is divided where it isn't whole.
                let share = if whole { number * reciprocal } else { number / divisor };
                let share = share.clamp(-1.0, 1.0);
                *code = bounds.iter().map(|bound| u8::from(*bound < share)).sum();
            }
            for code in codes {
                *code = order[usize::from(*code)];
            }
            if whole { largest } else { divisor }
        },
    )?;
    let scales = match nested {
        true => nest(&scales)?,
        false => Scales::Plain { scales: f32_tensor(scales)?, offsets: None },
    };
    Quantized::new(source.shape, Levels::Table(table), block, codes, scales)
}

/// Scales in 8 bits.
fn nest(scales: &[f32]) -> Result<Scales> {
    let (map, offset) = (dynamic_map(), sum(scales) / scales.len() as f32);
    let table = lookup(&map);
    let mut codes = vec![0u8; scales.len()];
    let mut nested = Vec::with_capacity(scales.len().div_ceil(NESTED));
    for (scales, codes) in scales.chunks(NESTED).zip(codes.chunks_mut(NESTED)) {
        let most = scales.iter().fold(0f32, |most, scale| most.max((scale - offset).abs()));
        nested.push(most);
        if most == 0.0 {
            continue;
        }
        let reciprocal = 1.0 / most;
        for (scale, code) in scales.iter().zip(codes) {
            let share = ((scale - offset) * reciprocal).clamp(-1.0, 1.0);
            let index = (share + 1.0) * 0.5 * (table.len() - 1) as f32 + 0.5;
            *code = table[(index as usize).min(table.len() - 1)];
        }
    }
    Ok(Scales::Nested {
        codes: bytes_tensor(codes)?,
        table: f32_tensor(map.to_vec())?,
        scales: f32_tensor(nested)?,
        offset,
    })
}

/// The codes of 65 536 numbers from -1 to 1.
fn lookup(map: &[f32; 256]) -> Vec<u8> {
    const COUNT: usize = 65_536;
    let mut code = 0;
    let code_of = |index: usize| {
        let number = -1.0 + 2.0 * index as f32 / (COUNT - 1) as f32;
        while code < 255 && 0.5 * (map[code] + map[code + 1]) < number {
            code += 1;
        }
        code as u8
    };
    (0..COUNT).map(code_of).collect()
}

/// The levels of bitsandbytes' signed dynamic data type in ascending order, its `create_dynamic_map()`: decade
/// `10^(i-6)` has `2^i` of each sign, the middles of so many equal parts of 0.1 to 1; and 0 and 1.
pub fn dynamic_map() -> [f32; 256] {
    const DECADES: i32 = 7;
    let (start, end) = (0.1f32, 1f32);
    let mut all = vec![0f32, 1.0];
    for decade in 0..DECADES {
        let parts = 1 << decade;
        let step = (end - start) / parts as f32;
        // As PyTorch's linspace: from both ends, fused.
        let bound = |index: i32| match index < (parts + 1) / 2 {
            true => step.mul_add(index as f32, start),
            false => (-step).mul_add((parts - index) as f32, end),
        };
        let scale = 10f64.powi(decade + 1 - DECADES) as f32;
        for part in 0..parts {
            let level = scale * ((bound(part) + bound(part + 1)) / 2.0);
            all.extend([level, -level]);
        }
    }
    all.sort_by(f32::total_cmp);
    let mut map = [0.0; 256];
    map.copy_from_slice(&all);
    map
}

/// A sum in the order of PyTorch's on one thread with vectors of 8: 32 sums side by side, each in four levels, so
/// that numbers of like size are added.
fn sum(numbers: &[f32]) -> f32 {
    const LANES: usize = 8;
    const WIDTH: usize = 4 * LANES;
    const LEVELS: usize = 4;
    let whole = numbers.len() / LANES * LANES;
    let rows = whole / WIDTH;
    let log = if rows <= 2 { 1 } else { (rows - 1).ilog2() + 1 };
    let power = (log / LEVELS as u32).max(4);
    let step = 1usize << power;
    let mut levels = [[0f32; WIDTH]; LEVELS];
    let add = |sums: &mut [f32], numbers: &[f32]| {
        for (sum, number) in sums.iter_mut().zip(numbers) {
            *sum += number;
        }
    };
    let (cascade, rest) = numbers[..whole].split_at(rows * WIDTH);
    for (index, row) in cascade.chunks_exact(WIDTH).enumerate() {
        add(&mut levels[0], row);
        let done = index + 1;
        if !done.is_multiple_of(step) {
            continue;
        }
        for level in 1..LEVELS {
            let below = std::mem::replace(&mut levels[level - 1], [0.0; WIDTH]);
            add(&mut levels[level], &below);
            if done & ((step - 1) << (level as u32 * power)) != 0 {
                break;
            }
        }
    }
    let [mut sums, above @ ..] = levels;
    for level in &above {
        add(&mut sums, level);
    }
    let (first, others) = sums.split_at_mut(LANES);
    for numbers in rest.chunks_exact(LANES) {
        add(first, numbers);
    }
    for sums in others.chunks_exact(LANES) {
        add(first, sums);
    }
    let tail = numbers[whole..].iter().fold(0.0, |sum, number| sum + number);
    first.iter().fold(tail, |sum, number| sum + number)
}

#[cfg(test)]
mod tests {
    use super::sum;

    /// The bits that `torch.sum` gives on one thread.
    #[test]
    fn sums_are_pytorchs() {
        let numbers: Vec<f32> = (0..1_200_000u64)
            .map(|index| ((index * 2_654_435_761) as u32 >> 8) as f32 / 16_777_216.0)
            .collect();
        for (count, bits) in [
            (1, 0x0000_0000),
            (7, 0x403e_a33e),
            (8, 0x4053_8453),
            (31, 0x4176_2c3f),
            (32, 0x4178_b7bc),
            (33, 0x4182_9358),
            (1_000, 0x43f9_fcf9),
            (4_101, 0x4500_2a0e),
            (20_000, 0x461c_3c0d),
            (70_003, 0x4708_b964),
            (1_200_000, 0x4912_7bf2),
        ] {
            assert_eq!(sum(&numbers[..count]).to_bits(), bits, "{count} numbers");
        }
    }
}
