//! What is timed is right: every operation against its formula in f64, and the work on models
//! against each other.

use candle_core::{DType, Device, Tensor};
use metal_candle_bench::rows::{
    CLIP_NORM, EPSILON, Inputs, LEARNING_RATE, LORA_SCALE, Pass, Precision, Row, WEIGHT_DECAY,
    Work, operations as rows, random_ids,
};
use metal_candle_bench::{model, operations};

/// A matrix of f64, or rows of whatever has more dimensions.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn of(tensor: &Tensor) -> Self {
        let columns = *tensor.dims().last().unwrap();
        let values = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        Self { rows: tensor.elem_count() / columns, columns, values }
    }

    fn make(rows: usize, columns: usize, at: impl Fn(usize, usize) -> f64) -> Self {
        let values =
            (0..rows * columns).map(|index| at(index / columns, index % columns)).collect();
        Self { rows, columns, values }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.values[row * self.columns + column]
    }

    fn transposed(&self) -> Self {
        Self::make(self.columns, self.rows, |row, column| self.at(column, row))
    }

    fn times(&self, other: &Self) -> Self {
        assert_eq!(self.columns, other.rows);
        Self::make(self.rows, other.columns, |row, column| {
            (0..self.columns).map(|inner| self.at(row, inner) * other.at(inner, column)).sum()
        })
    }

    fn plus(&self, factor: f64, other: &Self) -> Self {
        Self::make(self.rows, self.columns, |row, column| {
            self.at(row, column) + factor * other.at(row, column)
        })
    }
}

/// What `work` gives on these inputs, by its formula.
fn expected(work: &Work, inputs: &Inputs) -> Vec<Matrix> {
    let get = |name: &str| Matrix::of(&inputs.get(name).unwrap());
    match work {
        Work::LoraLinear { pass, .. } => {
            let (x, w, a, b) = (get("x"), get("weight"), get("a"), get("b"));
            let xa = x.times(&a);
            match pass {
                Pass::Forward => vec![x.times(&w.transposed()).plus(LORA_SCALE, &xa.times(&b))],
                Pass::Backward => {
                    let dy = get("dy");
                    let g = dy.times(&b.transposed());
                    let zero = |m: &Matrix| Matrix::make(m.rows, m.columns, |_, _| 0.0);
                    vec![
                        dy.times(&w).plus(LORA_SCALE, &g.times(&a.transposed())),
                        zero(&a).plus(LORA_SCALE, &x.transposed().times(&g)),
                        zero(&b).plus(LORA_SCALE, &xa.transposed().times(&dy)),
                    ]
                }
            }
        }
        Work::Softmax { pass, .. } => {
            let x = get("x");
            let exponentials: Vec<f64> = x.values.iter().map(|value| value.exp()).collect();
            let sums: Vec<f64> =
                exponentials.chunks(x.columns).map(|row| row.iter().sum()).collect();
            let y = Matrix::make(x.rows, x.columns, |row, column| {
                exponentials[row * x.columns + column] / sums[row]
            });
            match pass {
                Pass::Forward => vec![y],
                Pass::Backward => {
                    let dy = get("dy");
                    let products: Vec<f64> = (0..x.rows)
                        .map(|row| (0..x.columns).map(|c| y.at(row, c) * dy.at(row, c)).sum())
                        .collect();
                    vec![Matrix::make(x.rows, x.columns, |row, column| {
                        y.at(row, column) * (dy.at(row, column) - products[row])
                    })]
                }
            }
        }
        Work::LayerNorm { pass, .. } => {
            let (x, w) = (get("x"), get("weight"));
            let n = x.columns as f64;
            let mean_of = |row: usize, at: &dyn Fn(usize, usize) -> f64| -> f64 {
                (0..x.columns).map(|column| at(row, column)).sum::<f64>() / n
            };
            let means: Vec<f64> = (0..x.rows).map(|row| mean_of(row, &|r, c| x.at(r, c))).collect();
            let inverse: Vec<f64> = (0..x.rows)
                .map(|row| {
                    let variance = mean_of(row, &|r, c| (x.at(r, c) - means[r]).powi(2));
                    1.0 / (variance + EPSILON).sqrt()
                })
                .collect();
            let normed = Matrix::make(x.rows, x.columns, |row, column| {
                (x.at(row, column) - means[row]) * inverse[row]
            });
            match pass {
                Pass::Forward => {
                    let bias = get("bias");
                    vec![Matrix::make(x.rows, x.columns, |row, column| {
                        normed.at(row, column) * w.at(0, column) + bias.at(0, column)
                    })]
                }
                Pass::Backward => {
                    let dy = get("dy");
                    let u = |row: usize, column: usize| dy.at(row, column) * w.at(0, column);
                    let dx = Matrix::make(x.rows, x.columns, |row, column| {
                        let product = mean_of(row, &|r, c| u(r, c) * normed.at(r, c));
                        let mean = mean_of(row, &u);
                        inverse[row] * (u(row, column) - mean - normed.at(row, column) * product)
                    });
                    let over_rows = |at: &dyn Fn(usize, usize) -> f64| {
                        Matrix::make(1, x.columns, |_, column| {
                            (0..x.rows).map(|row| at(row, column)).sum()
                        })
                    };
                    let dweight =
                        over_rows(&|row, column| dy.at(row, column) * normed.at(row, column));
                    vec![dx, dweight, over_rows(&|row, column| dy.at(row, column))]
                }
            }
        }
        Work::RmsNorm { pass, .. } => {
            let (x, w) = (get("x"), get("weight"));
            let n = x.columns as f64;
            let inverse: Vec<f64> = (0..x.rows)
                .map(|row| {
                    let squares: f64 = (0..x.columns).map(|column| x.at(row, column).powi(2)).sum();
                    1.0 / (squares / n + EPSILON).sqrt()
                })
                .collect();
            let normed =
                Matrix::make(x.rows, x.columns, |row, column| x.at(row, column) * inverse[row]);
            match pass {
                Pass::Forward => {
                    vec![Matrix::make(x.rows, x.columns, |row, column| {
                        normed.at(row, column) * w.at(0, column)
                    })]
                }
                Pass::Backward => {
                    let dy = get("dy");
                    let dx = Matrix::make(x.rows, x.columns, |row, column| {
                        let mean = (0..x.columns)
                            .map(|inner| dy.at(row, inner) * w.at(0, inner) * normed.at(row, inner))
                            .sum::<f64>()
                            / n;
                        inverse[row]
                            * (dy.at(row, column) * w.at(0, column) - normed.at(row, column) * mean)
                    });
                    let dweight = Matrix::make(1, x.columns, |_, column| {
                        (0..x.rows).map(|row| dy.at(row, column) * normed.at(row, column)).sum()
                    });
                    vec![dx, dweight]
                }
            }
        }
        Work::AdamW { .. } => {
            let (parameters, gradients) = (get("parameters"), get("gradients"));
            let norm = gradients.values.iter().map(|value| value * value).sum::<f64>().sqrt();
            let scale = (CLIP_NORM / (norm + 1e-6)).min(1.0);
            vec![Matrix::make(1, parameters.columns, |_, column| {
                // After the first step, both moments' corrections leave the gradient's sign.
                let gradient = scale * gradients.at(0, column);
                parameters.at(0, column) * (1.0 - LEARNING_RATE * WEIGHT_DECAY)
                    - LEARNING_RATE * gradient / (gradient.abs() + 1e-8)
            })]
        }
        other => panic!("{other:?} is work on a model"),
    }
}

/// The same operation, smaller.
fn smaller(work: &Work) -> Work {
    let mut work = work.clone();
    match &mut work {
        Work::LoraLinear { tokens, hidden, rank, .. } => {
            (*tokens, *hidden, *rank) = (*tokens % 7 + 2, *hidden / 16 + 5, *rank / 4 + 1);
        }
        Work::Softmax { shape, .. }
        | Work::LayerNorm { shape, .. }
        | Work::RmsNorm { shape, .. } => *shape = vec![2, 3, 37],
        Work::AdamW { parameters } => *parameters = 4099,
        other => panic!("{other:?} is work on a model"),
    }
    work
}

#[test]
fn operations_give_what_their_formulas_give_in_f64() {
    for row in rows() {
        let work = smaller(&row.work);
        let inputs = Inputs::random(&work, 3).unwrap();
        let found = operations::prepare(&work, &inputs).unwrap().call().unwrap();
        let expected = expected(&work, &inputs);
        assert_eq!(found.len(), work.outputs().len(), "{}", row.name);
        assert_eq!(found.len(), expected.len(), "{}", row.name);
        for ((name, found), expected) in work.outputs().iter().zip(&found).zip(&expected) {
            let found = Matrix::of(found);
            let largest = expected.values.iter().fold(0.0, |max: f64, value| max.max(value.abs()));
            assert_eq!(found.values.len(), expected.values.len(), "{} {name}", row.name);
            for (found, expected) in found.values.iter().zip(&expected.values) {
                let error = (found - expected).abs();
                assert!(error <= 2e-6 * largest, "{} {name}: {found} {expected}", row.name);
            }
        }
    }
}

#[test]
fn calls_again_give_the_same() {
    let work = smaller(&Row::lora(1, 512, 8, Pass::Backward).work);
    let inputs = Inputs::random(&work, 1).unwrap();
    let mut workload = operations::prepare(&work, &inputs).unwrap();
    let bits = |results: Vec<Tensor>| -> Vec<u64> {
        results.iter().flat_map(|result| Matrix::of(result).values).map(f64::to_bits).collect()
    };
    assert_eq!(bits(workload.call().unwrap()), bits(workload.call().unwrap()));
}

fn scalars(results: &[Tensor]) -> Vec<f64> {
    results.iter().map(|result| Matrix::of(result).values[0]).collect()
}

#[test]
fn a_training_step_learns_and_recomputing_changes_nothing() {
    let row = |checkpointing| Row::train("tiny", (2, 12), 4, Precision::F32, checkpointing).work;
    let mut stored = model::prepare_random(&row(false), &Device::Cpu, 5).unwrap();
    let mut computed_again = model::prepare_random(&row(true), &Device::Cpu, 5).unwrap();
    let losses: Vec<f64> = (0..6)
        .map(|_| {
            let results = scalars(&stored.call().unwrap());
            assert_eq!(results, scalars(&computed_again.call().unwrap()));
            assert!(results[1] > 0.0, "{results:?}");
            results[0]
        })
        .collect();
    // Random weights know nothing: the loss starts near that of a uniform guess among 128.
    assert!((losses[0] - 128f64.ln()).abs() < 0.1, "{losses:?}");
    assert!(losses[5] < losses[0], "{losses:?}");
}

#[test]
fn decoding_takes_the_largest_logit_that_a_prefill_of_the_same_text_gives() {
    let decode = Row::decode("tiny", 5, 7, Precision::F32).work;
    let mut workload = model::prepare_random(&decode, &Device::Cpu, 9).unwrap();
    let mut run = || {
        workload.reset().unwrap();
        workload.call().unwrap()[0].to_vec1::<u32>().unwrap()
    };
    let tokens = run();
    assert_eq!(tokens, run());
    let mut text = random_ids(5, 128, 9);
    for step in 0..=7 {
        let prefill = Row::prefill("tiny", text.len(), Precision::F32).work;
        let model = model::random("tiny", Precision::F32, &Device::Cpu, None, 9).unwrap();
        let results = model::prepare(&prefill, model, None, &text).unwrap().call().unwrap();
        let logits = Matrix::of(&results[0]).values;
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        if step > 0 {
            assert_eq!(tokens[step - 1] as usize, best, "step {step}");
        }
        text.push(best as u32);
    }
}
