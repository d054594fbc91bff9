use super::*;
use crate::backend::cpu::element::Values;
use half::bf16;
use std::sync::Mutex;

/// Small whole numbers, exact in every type and sum.
fn number(index: usize) -> f32 {
    ((index * 7919 + 13) % 17) as f32 - 8.0
}

fn product<A: Real>(
    kind: Kind,
    (rows, depth, columns): (usize, usize, usize),
    lhs: Operand<A>,
    rhs: Operand<A>,
) -> Vec<f64> {
    let lhs = Lhs::pack(kind, rows, depth, lhs, None);
    let out = Mutex::new(vec![f64::NAN; rows * columns]);
    let finish = |mut block: Block<A>| {
        let mut out = out.lock().unwrap();
        let first = block.columns.start;
        for (row, sums) in block.rows_mut() {
            for (column, sum) in sums.iter().enumerate() {
                out[row * columns + first + column] = sum.to_f64();
            }
        }
    };
    products(&[Job { rows, columns, terms: &[Term::Numbers { lhs: &lhs, rhs }], finish: &finish }]);
    out.into_inner().unwrap()
}

fn kinds() -> Vec<Kind> {
    let fast: &[Kind] = &[];
    #[cfg(target_arch = "x86_64")]
    let fast = {
        use metal_candle_cpu::simd::{Level, level};
        match level() {
            level if level >= Level::Amx => &[Kind::Pairs, Kind::Tiles][..],
            level if level >= Level::Avx512Bf16 => &[Kind::Pairs],
            _ => fast,
        }
    };
    [&[Kind::Plain], fast].concat()
}

#[test]
fn every_kind_and_orientation_gives_the_exact_product() {
    for (rows, depth, columns) in [
        (1, 1, 1),
        (5, 3, 7),
        (12, 16, 32),
        (13, 17, 33),
        (33, 257, 31),
        (70, 1000, 65),
        (600, 40, 20),
        (16, 700, 600),
        // Several rows by lines as they are stored: all remainders of rows, lines and numbers.
        (2, 64, 6),
        (7, 576, 70),
        (31, 1310, 129),
        (48, 650, 35),
        (49, 650, 35),
    ] {
        let left: Vec<f32> = (0..rows * depth).map(number).collect();
        let right: Vec<f32> = (0..depth * columns).map(|i| number(i + 5)).collect();
        let transposed = |data: &[f32], rows: usize, columns: usize| -> Vec<f32> {
            (0..rows * columns).map(|i| data[i % rows * columns + i / rows]).collect()
        };
        let mut exact = vec![0.0; rows * columns];
        for row in 0..rows {
            for k in 0..depth {
                for column in 0..columns {
                    exact[row * columns + column] +=
                        f64::from(left[row * depth + k]) * f64::from(right[k * columns + column]);
                }
            }
        }
        let left_columns = transposed(&left, rows, depth);
        let right_lines = transposed(&right, depth, columns);
        let half = |data: &[f32]| data.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
        let halves = [half(&left), half(&left_columns), half(&right_lines), half(&right)];
        for kind in kinds() {
            for stored_as_bf16 in [false, true] {
                let [a, b, c, d]: [Values<f32>; 4] = if stored_as_bf16 {
                    [0, 1, 2, 3].map(|i| Values::Bf16(&halves[i]))
                } else {
                    [&left, &left_columns, &right_lines, &right].map(|x| Values::Native(&x[..]))
                };
                for lhs in [Operand::lines(a, depth), Operand::columns(b, rows)] {
                    for rhs in [Operand::lines(c, depth), Operand::columns(d, columns)] {
                        let result = product(kind, (rows, depth, columns), lhs, rhs);
                        assert_eq!(result, exact, "{kind:?} {rows} {depth} {columns}");
                    }
                }
            }
        }
        let wide = |data: &[f32]| data.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        let (left, right) = (wide(&left), wide(&right));
        let lhs = Operand::lines(Values::Native(&left), depth);
        let rhs = Operand::columns(Values::Native(&right), columns);
        assert_eq!(product::<f64>(Kind::Plain, (rows, depth, columns), lhs, rhs), exact);
    }
}

#[test]
fn terms_add_up_and_no_term_is_zero() {
    let ones = vec![bf16::ONE; 40 * 40];
    let operand = Operand::lines(Values::Bf16(&ones), 40);
    // The last two are so few that lines may be multiplied as they are stored.
    for (kind, rows) in kinds().into_iter().flat_map(|kind| [(kind, 40), (kind, 20), (kind, 3)]) {
        let lhs = Lhs::pack(kind, rows, 40, operand, None);
        let twice = Lhs::pack(kind, rows, 40, operand, Some(&|_, row| row.fill(2.0)));
        let (stride, mut seen) = (sum_stride(40), Vec::new());
        for terms in [
            vec![],
            vec![Term::Numbers { lhs: &lhs, rhs: operand }],
            vec![
                Term::Numbers { lhs: &lhs, rhs: operand },
                Term::Numbers { lhs: &twice, rhs: operand },
            ],
        ] {
            let mut sums = vec![f32::NAN; sum_count(rows, stride)];
            add_terms(&terms, 0..rows, 0..40, &mut sums, stride);
            let sums = sums.chunks(stride).take(rows).flat_map(|row| &row[..40]);
            seen.push(sums.copied().reduce(|a, b| if a == b { a } else { f32::NAN }));
        }
        assert_eq!(seen, [Some(0.0), Some(40.0), Some(120.0)], "{kind:?} {rows}");
    }
}

#[test]
fn a_row_has_the_same_bits_beside_any_number_of_others() {
    let (most, depth, columns) = (48, 1310, 70);
    let numbers = |count: usize, seed: usize| -> Vec<bf16> {
        let of = |i: usize| f64::sin((i * 7919 + seed) as f64) / ((i % 13 + 1) as f64);
        (0..count).map(|i| bf16::from_f64(of(i))).collect()
    };
    let (left, right) = (numbers(most * depth, 1), numbers(columns * depth, 2));
    for kind in kinds() {
        let sums = |rows: usize| {
            let lhs = Operand::lines(Values::Bf16(&left[..rows * depth]), depth);
            let rhs = Operand::lines(Values::Bf16(&right), depth);
            product::<f32>(kind, (rows, depth, columns), lhs, rhs)
        };
        let all = sums(most);
        for rows in (1..10).chain([17, 31]) {
            assert!(sums(rows) == all[..rows * columns], "{kind:?} {rows}");
        }
    }
}
