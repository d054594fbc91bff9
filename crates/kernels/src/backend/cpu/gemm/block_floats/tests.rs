use super::*;
use crate::quantized::Levels;
use crate::quantized::cpu::Inputs;
use crate::quantized::testing::{every_kind, plain};

/// By each kind of instructions that this machine has, of which products take one: all remainders of rows and lines, and
/// rows of more than one block.
#[test]
fn every_kind_gives_the_product() {
    for (rows, outer, inner) in [(1, 1, 64), (13, 33, 256), (5, 70, 1536), (40, 16, 576)] {
        let mut multiplied = 0;
        for (name, matrix) in every_kind((outer, inner)) {
            let inputs = Inputs::new(&matrix).unwrap();
            let reads = inputs.read();
            let view = reads.view().unwrap();
            let rounded = if name == "nf4" { 0.5 / f64::from(IntegerLines::LARGEST) } else { 0.0 };
            let lines = IntegerLines::of(view.elements(), inner);
            let Some(rhs) = lines.filter(|lines| fits(lines, inner)) else { continue };
            multiplied += 1;
            // Neighbours and groups of different sizes, and groups of nothing.
            let number = |index: usize| {
                let sign = if index.is_multiple_of(3) { -1.0 } else { 1.0 };
                let size = 1.0 + (index * 7919 % 97) as f32 / 97.0;
                let exponent = (index * 31 % 11) as i32 - 5 + 3 * (index / GROUP % 3) as i32;
                if index / GROUP % 5 == 4 { 0.0 } else { sign * size * 2f32.powi(exponent) }
            };
            let x: Vec<bf16> =
                (0..rows * inner).map(|index| bf16::from_f32(number(index))).collect();
            let mut dense = vec![0f32; outer * inner];
            view.elements().read(0, &mut dense);
            let lhs = BlockFloats::pack(rows, inner, &x);
            let scale_of = |line: usize, group: usize| {
                let mut scales = [0f32; IntegerLines::LANES];
                rhs.read_scales(line, group * GROUP / rhs.group(), &mut scales, &mut []);
                f64::from(scales[0].abs() * IntegerLines::LARGEST as f32)
            };
            for by in By::of_machine() {
                let stride = outer.next_multiple_of(PANEL);
                let mut sums = vec![f32::NAN; (rows + SPARE_ROWS) * stride];
                let product = Product { lhs: &lhs, rhs };
                product.add_by(by, 0..rows, 0..outer, &mut sums, stride, false);
                // Once more from the second row on, of lines from the second panel on where there is one.
                let second = if outer > PANEL { PANEL } else { 0 };
                if rows > 1 {
                    let part = &mut sums[stride + second..];
                    product.add_by(by, 1..rows, second..outer, part, stride, true);
                }
                for row in 0..rows {
                    for line in 0..outer {
                        let times = if row > 0 && line >= second { 2.0 } else { 1.0 };
                        let (mut exact, mut lost) = (0f64, 0f64);
                        let groups = x[row * inner..][..inner].chunks(GROUP);
                        let lines = dense[line * inner..][..inner].chunks(GROUP);
                        for (group, (x, w)) in groups.zip(lines).enumerate() {
                            let scale = if rounded > 0.0 { scale_of(line, group) } else { 0.0 };
                            let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
                            let w: Vec<f64> = w.iter().map(|w| f64::from(*w)).collect();
                            let size =
                                |of: &[f64]| of.iter().fold(0f64, |size, it| size.max(it.abs()));
                            exact += x.iter().zip(&w).map(|(x, w)| x * w).sum::<f64>();
                            let sum = |of: &[f64]| of.iter().map(|it| it.abs()).sum::<f64>();
                            lost += size(&x) * sum(&w) * 2f64.powi(-15);
                            // Numbers of a table, and sums in f32, of which a line's offsets are a part.
                            lost += sum(&x) * scale * rounded + sum(&x) * size(&w) * 2f64.powi(-20);
                        }
                        let found = f64::from(sums[row * stride + line]);
                        assert!(
                            (found - times * exact).abs() <= times * lost,
                            "{name} {by:?} {rows} {outer} {inner}: {row} {line}: {found}, not {exact} times {times}"
                        );
                    }
                }
            }
        }
        let nothing = By::of_machine().next().is_none();
        assert!(multiplied > 3 || nothing, "{multiplied} of {inner}");
    }
}

#[test]
fn numbers_up_to_seven_powers_of_two_apart_are_exact() {
    let depth = 2 * GROUP;
    let x: Vec<bf16> = (0..depth)
        .map(|index| bf16::from_f32((1.0 + index as f32 / 128.0) * 2f32.powi(-(index as i32 % 8))))
        .collect();
    let packed = BlockFloats::pack(1, depth, &x);
    for (index, x) in x.iter().enumerate() {
        let word = packed.words[index / 2];
        let integer = if index % 2 == 0 { word as i16 } else { (word >> 16) as i16 };
        assert_eq!(f32::from(integer) * packed.powers[index / GROUP], x.to_f32(), "{index}");
    }
    for (group, sum) in packed.sums.iter().take(2).enumerate() {
        let exact: f32 = x[group * GROUP..][..GROUP].iter().map(|x| x.to_f32()).sum();
        assert!((sum - exact).abs() < 1e-6 * exact);
    }
}

#[test]
fn what_is_not_finite_shows_in_its_row() {
    let (rows, outer, inner) = (3, 5, 96);
    let levels = Levels::Integers { bits: 4, zero: 8 };
    let matrix = plain((outer, inner), levels, 32, DType::F32, false);
    let inputs = Inputs::new(&matrix).unwrap();
    let reads = inputs.read();
    let view = reads.view().unwrap();
    let rhs = IntegerLines::of(view.elements(), inner);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = vec![bf16::ONE; rows * inner];
        x[inner + 40] = bf16::from_f32(bad);
        let lhs = BlockFloats::pack(rows, inner, &x);
        for by in By::of_machine() {
            let Some(rhs) = rhs else { continue };
            let mut sums = vec![0f32; (rows + SPARE_ROWS) * PANEL];
            Product { lhs: &lhs, rhs }.add_by(by, 0..rows, 0..outer, &mut sums, PANEL, false);
            for (row, sums) in sums.chunks(PANEL).take(rows).enumerate() {
                assert!(
                    sums[..outer].iter().all(|sum| sum.is_finite() == (row != 1)),
                    "{by:?} {row}"
                );
            }
        }
    }
}
