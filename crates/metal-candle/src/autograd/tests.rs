//! The tape by itself, and the whole of it against Candle's own gradients.

use super::{
    ExpertValues, GradientSink, LoraValues, Matrix, Parameter, ParameterId, ProjectionValues, Tape,
    Value,
};
use crate::Result;
use crate::random::SplitMix64;
use candle_core::{DType, Device, Tensor, Var};
use metal_candle_kernels::offload::Offload;
use metal_candle_kernels::{attention, glu};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut random = SplitMix64::new(seed);
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| random.normal()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn weight(tensor: Tensor, id: usize) -> Parameter {
    Parameter::new(tensor, ParameterId(id))
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Sums all elements, weighted so that every one has another gradient.
fn weighted_sum(tape: &Tape, x: &Value) -> Value {
    let count = x.tensor().elem_count();
    let weights: Vec<f64> = (0..count).map(|index| ((index as f64) * 0.7).sin() + 0.3).collect();
    let weights = Tensor::from_vec(weights, x.shape().clone(), &Device::Cpu).unwrap();
    let sum = (x.tensor() * &weights).unwrap().sum_all().unwrap();
    let backward = move |dy: Tensor| Ok(vec![Some(weights.affine(dy.to_scalar::<f64>()?, 0.0)?)]);
    tape.push(&[x], sum, backward).unwrap()
}

type Found = BTreeMap<usize, Vec<f64>>;

fn backward(tape: Tape, root: &Value) -> Found {
    let mut found: Found = BTreeMap::new();
    tape.backward(root, 1.0, &mut |id: ParameterId, gradient: Tensor| -> Result<()> {
        let gradient = values(&gradient);
        match found.entry(id.0) {
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert(gradient);
            }
            std::collections::btree_map::Entry::Occupied(mut entry) => {
                for (sum, value) in entry.get_mut().iter_mut().zip(gradient) {
                    *sum += value;
                }
            }
        }
        Ok(())
    })
    .unwrap();
    found
}

/// Compares the gradient of every weight with central differences.
fn check(weights: &[Tensor], forward: impl Fn(&Tape, &[Parameter]) -> Value) {
    let trainable = |tensors: &[Tensor]| -> Vec<Parameter> {
        tensors.iter().enumerate().map(|(id, tensor)| weight(tensor.clone(), id)).collect()
    };
    let tape = Tape::training();
    let root = forward(&tape, &trainable(weights));
    let found = backward(tape, &root);
    assert_eq!(found.len(), weights.len());
    let step = 1e-5;
    for (id, tensor) in weights.iter().enumerate() {
        for index in 0..tensor.elem_count() {
            let moved = |by: f64| {
                let mut changed = values(tensor);
                changed[index] += by;
                let mut tensors = weights.to_vec();
                tensors[id] = Tensor::from_vec(changed, tensor.shape(), &Device::Cpu).unwrap();
                let root = forward(&Tape::inference(), &trainable(&tensors));
                root.tensor().to_scalar::<f64>().unwrap()
            };
            let wanted = (moved(step) - moved(-step)) / (2.0 * step);
            let gradient = found[&id][index];
            assert!(
                (gradient - wanted).abs() < 1e-6 * (1.0 + wanted.abs()),
                "weight {id}, element {index}: {gradient}, expected {wanted}"
            );
        }
    }
}

#[test]
fn views_and_sums_have_the_gradients_of_finite_differences() {
    let (x, y) = (random(&[2, 3, 5], 1), random(&[2, 3, 5], 2));
    check(&[x, y], |tape, weights| {
        let (x, y) = (tape.parameter(&weights[0]), tape.parameter(&weights[1]));
        let sum = tape.add(&tape.scale(&x, -1.7).unwrap(), &y).unwrap();
        // One piece is used twice, one not at all.
        let pieces = tape.split(&sum, &[2, 1, 2], 2).unwrap();
        let twice = tape.add(&pieces[0], &pieces[0]).unwrap();
        let compact = tape.compact(&pieces[2]).unwrap();
        // Where nothing needs a gradient, nothing is kept.
        assert_eq!(compact.tensor().is_contiguous(), pieces[2].needs_gradient());
        assert!(!pieces[2].tensor().is_contiguous());
        let both = tape.add(&twice, &compact).unwrap();
        let flat = tape.reshape(&both, (4, 3)).unwrap();
        weighted_sum(tape, &tape.cast(&flat, DType::F64).unwrap())
    });
}

#[test]
fn a_mixture_of_experts_has_the_gradients_of_finite_differences() {
    // Six tokens, four experts.
    let weights = [random(&[6, 5], 1), random(&[4, 5], 2), random(&[40, 5], 3), random(&[40], 4)];
    for normalized in [true, false] {
        check(&weights, |tape, weights| {
            let [x, router, experts, biases] =
                [0, 1, 2, 3].map(|index| tape.parameter(&weights[index]));
            let logits = tape.linear(&x, &router, None).unwrap();
            let (weights, routes) = tape.route(&logits, 2, normalized).unwrap();
            let dispatch = routes.dispatch();
            let rows = Tensor::from_vec(dispatch.tokens, (1, 12), &Device::Cpu).unwrap();
            let places = Tensor::from_vec(dispatch.places, (6, 2), &Device::Cpu).unwrap();
            let gathered = tape.rows(&x, &rows).unwrap();
            let gathered = tape.reshape(&gathered, (12, 5)).unwrap();
            // Of each expert two matrices, of which one has a bias.
            let matrices = tape.split(&experts, &[5; 8], 0).unwrap();
            let biases = tape.split(&biases, &[5; 8], 0).unwrap();
            let groups = dispatch.experts.iter().map(|(expert, rows)| ExpertValues {
                rows: *rows,
                layers: [2 * expert, 2 * expert + 1]
                    .map(|index| {
                        let bias = (index % 2 == 1).then(|| biases[index].clone());
                        (Matrix::Dense(matrices[index].clone()), bias)
                    })
                    .to_vec(),
            });
            let outputs = tape.grouped(&gathered, &groups.collect::<Vec<_>>()).unwrap();
            let outputs = tape.glu(&outputs[0], &outputs[1], glu::Activation::Silu).unwrap();
            weighted_sum(tape, &tape.combine(&outputs, &weights, &places).unwrap())
        });
    }
}

#[test]
fn a_small_network_has_the_gradients_of_finite_differences() {
    use metal_candle_kernels::attention::Options;
    use metal_candle_kernels::glu::Activation;
    let ids = Tensor::new(&[[1_u32, 0, 3], [2, 2, 1]], &Device::Cpu).unwrap();
    let (cos, sin) = {
        let angles = random(&[2, 3, 2], 20).to_dtype(DType::F32).unwrap();
        (angles.cos().unwrap(), angles.sin().unwrap())
    };
    let weights = [
        random(&[4, 8], 1),
        random(&[8], 2),
        random(&[8, 8], 3),
        random(&[8], 4),
        random(&[8, 2], 5),
        random(&[2, 8], 6),
        random(&[2], 8),
    ];
    check(&weights, |tape, weights| {
        let value = |index: usize| tape.parameter(&weights[index]);
        let x = tape.embedding(&value(0), &ids).unwrap();
        let x = tape.rms_norm(&x, &value(1), 1e-5, 1.0).unwrap();
        let frozen = Matrix::Dense(tape.constant(random(&[8, 8], 7)));
        let (a, b) = (value(4), value(5));
        let lora = super::LoraValues { a: &a, b: &b, scale: 0.5, dropout: None };
        let other = Matrix::Dense(tape.constant(random(&[8, 8], 8)));
        let layers = [
            super::ProjectionValues { weight: &frozen, bias: None, lora: Some(lora) },
            super::ProjectionValues { weight: &other, bias: None, lora: None },
        ];
        let [q, v] = tape.projections(&x, &layers).unwrap().try_into().unwrap();
        let (weight, bias) = (Matrix::Dense(value(2)), value(3));
        let layer = super::ProjectionValues { weight: &weight, bias: Some(&bias), lora: None };
        let [k] = tape.projections(&x, &[layer]).unwrap().try_into().unwrap();
        let heads = |x: &Value, count: usize| tape.reshape(x, (2, 3, count, 8 / count)).unwrap();
        let (q, k) = tape.rope(&heads(&q, 2), &heads(&k, 2), &cos, &sin).unwrap();
        let options = Options { scale: 0.4, softcap: Some(3.0), window: Some(2), sinks: None };
        let v = heads(&v, 2);
        let attended = tape.attention([&q, &k, &v], None, Some(&value(6)), &options).unwrap();
        let gated = tape.glu(&heads(&x, 2), &attended, Activation::GeluTanh).unwrap();
        weighted_sum(tape, &gated)
    });
}

#[test]
fn a_norm_of_a_residual_sum_has_the_gradients_of_finite_differences() {
    let weights = [random(&[2, 3, 8], 1), random(&[2, 3, 8], 2), random(&[8], 3)];
    // What follows uses the sum, its norm, or both.
    for (use_sum, use_norm) in [(true, true), (false, true), (true, false)] {
        // What is trained: all, one of the addends, the norm's weight.
        for trained in [&[0, 1, 2][..], &[0], &[1], &[2]] {
            if !use_norm && (trained == [2] || trained.len() == 3) {
                continue;
            }
            let tensors: Vec<Tensor> = trained.iter().map(|&id| weights[id].clone()).collect();
            check(&tensors, |tape, weights_in_test| {
                let value = |id: usize| match trained.iter().position(|&other| other == id) {
                    Some(index) => tape.parameter(&weights_in_test[index]),
                    None => tape.constant(weights[id].clone()),
                };
                let (x, residual, weight) = (value(0), value(1), value(2));
                let (sum, normed) =
                    tape.rms_norm_residual(&x, &residual, &weight, 1e-5, 1.0).unwrap();
                match (use_sum, use_norm) {
                    (true, true) => weighted_sum(tape, &tape.add(&sum, &normed).unwrap()),
                    (true, false) => weighted_sum(tape, &sum),
                    _ => weighted_sum(tape, &normed),
                }
            });
        }
    }
}

#[test]
fn nothing_has_a_node_that_no_parameter_feeds() {
    let tape = Tape::training();
    let frozen = tape.constant(random(&[3, 4], 1));
    let x = tape.constant(random(&[2, 4], 2));
    let y = tape.linear(&x, &frozen, None).unwrap();
    let y = tape.add(&y, &y).unwrap();
    assert!(tape.is_empty());
    assert!(!y.needs_gradient());
    assert!(
        tape.backward(&y, 1.0, &mut |_: ParameterId, _: Tensor| -> Result<()> { Ok(()) }).is_err()
    );
}

#[test]
fn backward_starts_from_a_scalar_only() {
    let tape = Tape::training();
    let x = tape.parameter(&weight(random(&[2, 4], 2), 0));
    let error = tape
        .backward(&x, 1.0, &mut |_: ParameterId, _: Tensor| -> Result<()> { Ok(()) })
        .unwrap_err();
    assert!(error.to_string().contains("scalar"), "{error}");
}

#[test]
// A segment stays on its thread.
#[allow(clippy::arc_with_non_send_sync)]
fn values_of_another_tape_are_refused() {
    let own = weight(random(&[2, 2], 1), 0);
    let ids = Tensor::new(&[[1_u32]], &Device::Cpu).unwrap();
    let refused = |result: Result<()>| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("of another tape"), "{message}");
    };
    // Of a tape with more nodes than this one has, and with as many.
    for count in [3, 1] {
        let (tape, other) = (Tape::training(), Tape::training().with_checkpointing(true));
        let x = tape.parameter(&own);
        weighted_sum(&tape, &x);
        let mut foreign = other.parameter(&weight(random(&[2, 2], 2), 1));
        for _ in 1..count {
            foreign = other.scale(&foreign, 2.0).unwrap();
        }
        let (root, before) = (weighted_sum(&other, &foreign), tape.len());
        refused(tape.add(&x, &foreign).map(drop));
        refused(tape.linear(&x, &foreign, None).map(drop));
        refused(tape.split(&foreign, &[1, 1], 0).map(drop));
        refused(tape.embedding(&foreign, &ids).map(drop));
        refused(Tape::inference().scale(&foreign, 2.0).map(drop));
        assert_eq!(tape.len(), before);
        refused(
            tape.backward(&root, 1.0, &mut |_: ParameterId, _: Tensor| -> Result<()> { Ok(()) }),
        );

        // A segment is run on tapes of its own.
        let own_value = other.parameter(&own);
        let captured = own_value.clone();
        let adds: super::Segment =
            Arc::new(move |tape, inputs| Ok(vec![tape.add(&inputs[0], &captured)?]));
        refused(other.segment(&[&foreign], adds).map(drop));
        let same: super::Segment = Arc::new(|_, inputs| Ok(inputs.to_vec()));
        let third = Tape::training().with_checkpointing(true);
        refused(third.segment(&[&foreign], same).map(drop));
        let gives: super::Segment = Arc::new(move |_, _| Ok(vec![own_value.clone()]));
        let root = weighted_sum(&other, &other.segment(&[&foreign], gives).unwrap()[0]);
        refused(
            other.backward(&root, 1.0, &mut |_: ParameterId, _: Tensor| -> Result<()> { Ok(()) }),
        );
        // What no parameter feeds is nobody's.
        let constant = Tape::training().constant(random(&[2, 2], 3));
        let tape = Tape::training();
        let sum = tape.add(&tape.parameter(&own), &constant).unwrap();
        let root = weighted_sum(&tape, &sum);
        assert_eq!(backward(tape, &root).len(), 1);
    }
}

#[test]
fn a_recomputed_segment_gives_the_same_gradients_and_stores_one_node() {
    let tensors = [random(&[5, 4], 1), random(&[4, 4], 2), random(&[4, 4], 3)];
    let run = |recompute: bool| {
        let tape = Tape::training().with_checkpointing(recompute);
        let weights: Vec<Parameter> =
            tensors.iter().enumerate().map(|(id, tensor)| weight(tensor.clone(), id)).collect();
        let mut x = tape.parameter(&weights[0]);
        let before = tape.len();
        for layer in &weights[1..] {
            let layer = layer.clone();
            // Two outputs, of which only one is used further on.
            let segment: super::Segment = Arc::new(move |tape: &Tape, inputs: &[Value]| {
                let y = tape.linear(&inputs[0], &tape.parameter(&layer), None)?;
                let y = tape.add(&y, &inputs[0])?;
                Ok(vec![tape.scale(&y, 2.0)?, y])
            });
            x = tape.segment(&[&x], segment).unwrap().remove(1);
        }
        if recompute {
            assert_eq!(tape.len() - before, 2);
        }
        let root = weighted_sum(&tape, &x);
        backward(tape, &root)
    };
    assert_eq!(run(false), run(true));
}

#[test]
// A segment stays on its thread.
#[allow(clippy::arc_with_non_send_sync)]
fn a_segment_keeps_what_it_was_told_to_until_its_second_run() {
    let runs = |nested: bool, tape: Tape| {
        let (count, inner) = (Rc::new(Cell::new(0)), weight(random(&[3, 3], 1), 0));
        let counted = count.clone();
        let segment: super::Segment = Arc::new(move |tape: &Tape, inputs: &[Value]| {
            let x = tape.linear(&inputs[0], &tape.parameter(&inner), None)?;
            for factor in [2.0, 3.0] {
                let [kept, other] = tape.keep(|| {
                    counted.set(counted.get() + 1);
                    Ok([(x.tensor() * factor)?, x.tensor().clone()])
                })?;
                assert_eq!(values(&kept), values(&(&other * factor)?));
            }
            Ok(vec![x])
        });
        let segment: super::Segment = match nested {
            true => Arc::new(move |tape, inputs| tape.segment(&[&inputs[0]], segment.clone())),
            false => segment,
        };
        let x = tape.constant(random(&[2, 3], 2));
        let y = tape.segment(&[&x], segment).unwrap().remove(0);
        if tape.is_training() {
            let root = weighted_sum(&tape, &y);
            assert_eq!(backward(tape, &root).len(), 1);
        }
        count.get()
    };
    let checkpointing = || Tape::training().with_checkpointing(true);
    assert_eq!(runs(false, checkpointing()), 2);
    assert_eq!(runs(false, Tape::inference()), 2);
    // The outer segment computes it twice: in its own first run and, kept from there, in its second.
    assert_eq!(runs(true, checkpointing()), 4);
}

#[test]
// A segment stays on its thread.
#[allow(clippy::arc_with_non_send_sync)]
fn the_second_run_leaves_out_what_only_the_first_run_needs() {
    let [x, a, b] = [random(&[5, 4], 1), random(&[4, 2], 2), random(&[2, 4], 3)];
    let w = random(&[4, 4], 4);
    // Whether a norm reads the projection, the sum, or nothing does.
    for reads in [None, Some("projection"), Some("sum")] {
        let run = |checkpointing: bool| {
            let left_out = Rc::new(RefCell::new(Vec::new()));
            let (a, b, w, found) =
                (weight(a.clone(), 0), weight(b.clone(), 1), w.clone(), left_out.clone());
            let segment: super::Segment = Arc::new(move |tape: &Tape, inputs: &[Value]| {
                let (a, b) = (tape.parameter(&a), tape.parameter(&b));
                let lora = Some(LoraValues { a: &a, b: &b, scale: 2.0, dropout: None });
                let layer = ProjectionValues {
                    weight: &Matrix::Dense(tape.constant(w.clone())),
                    bias: None,
                    lora,
                };
                let branch = tape.projections(&inputs[0], &[layer])?.remove(0);
                let sum = tape.add(&inputs[0], &branch)?;
                if tape.is_replaying() {
                    found.borrow_mut().push(branch.tensor().stride() == [0, 0]);
                }
                let ones = tape.constant(Tensor::ones(4, DType::F64, &Device::Cpu)?);
                Ok(vec![match reads {
                    Some("projection") => {
                        tape.add(&sum, &tape.rms_norm(&branch, &ones, 1e-5, 0.0)?)?
                    }
                    Some(_) => tape.add(&sum, &tape.rms_norm(&sum, &ones, 1e-5, 0.0)?)?,
                    None => sum,
                }])
            });
            let tape = Tape::training().with_checkpointing(checkpointing);
            let y = tape.segment(&[&tape.constant(x.clone())], segment).unwrap().remove(0);
            let root = weighted_sum(&tape, &y);
            let gradients = backward(tape, &root);
            (gradients, left_out.take())
        };
        let ((stored, none), (recomputed, left_out)) = (run(false), run(true));
        assert_eq!(stored, recomputed, "{reads:?}");
        assert_eq!((none, left_out), (vec![], vec![reads.is_none()]), "{reads:?}");
    }
}

#[test]
// A segment stays on its thread.
#[allow(clippy::arc_with_non_send_sync)]
fn what_waits_elsewhere_comes_back_and_is_let_go() {
    const LAYERS: usize = 3;
    let weights: Vec<_> =
        (0..2 * LAYERS).map(|id| weight(random(&[6, 6], id as u64), id)).collect();
    // How many groups wait for the backward pass, and the gradients, of layers of which the first are frozen.
    let run = |frozen: usize, checkpointing: bool, offload: Option<&Arc<Offload>>| {
        let tape =
            Tape::training().with_checkpointing(checkpointing).with_offload(offload.cloned());
        let mut x = tape.constant(random(&[2, 5, 6], 9));
        for layer in 0..LAYERS {
            let both = [&weights[2 * layer], &weights[2 * layer + 1]].map(Parameter::clone);
            let segment: super::Segment = Arc::new(move |tape: &Tape, inputs: &[Value]| {
                let [query, other] = both.each_ref().map(|weight| match layer < frozen {
                    true => tape.constant(weight.tensor().clone()),
                    false => tape.parameter(weight),
                });
                let x = &inputs[0];
                let heads = |x: &Value, heads| tape.reshape(x, (2, 5, heads, 6 / heads));
                let q = heads(&tape.linear(x, &query, None)?, 3)?;
                let k = heads(&tape.linear(x, &other, None)?, 3)?;
                let options =
                    attention::Options { scale: 0.7, softcap: None, window: None, sinks: None };
                let attended = tape.attention([&q, &k, &heads(x, 3)?], None, None, &options)?;
                let gated = tape.glu(&heads(x, 3)?, &attended, glu::Activation::Silu)?;
                Ok(vec![tape.add(x, &tape.reshape(&gated, (2, 5, 6))?)?])
            });
            x = tape.segment(&[&x], segment).unwrap().remove(0);
        }
        let root = weighted_sum(&tape, &x);
        // The tape has one, too.
        let waiting = offload.map_or(0, |offload| Arc::strong_count(offload) - 2);
        (waiting, backward(tape, &root))
    };
    let offload = Offload::new(&Device::Cpu).unwrap();
    for (frozen, checkpointing, expected) in
        [(0, false, 5), (1, false, 3), (0, true, 3), (2, true, 1)]
    {
        let (waiting, found) = run(frozen, checkpointing, Some(&offload));
        assert_eq!(waiting, expected, "{frozen} {checkpointing}");
        assert_eq!(Arc::strong_count(&offload), 1);
        assert_eq!(found.len(), 2 * (LAYERS - frozen));
        assert_eq!(found, run(frozen, checkpointing, None).1, "{frozen} {checkpointing}");
    }
}

#[test]
fn what_an_operation_keeps_anyway_stays() {
    let numbers = |shape: &[usize], seed| random(shape, seed).to_dtype(DType::F32).unwrap();
    let offload = Offload::new(&Device::Cpu).unwrap();
    let tape = Tape::training().with_offload(Some(offload.clone()));
    let waiting = || Arc::strong_count(&offload) - 2;
    let x = tape.parameter(&weight(numbers(&[2, 6], 1), 0));
    let m = tape.parameter(&weight(numbers(&[6], 2), 1));
    let bias = tape.parameter(&weight(numbers(&[6], 3), 2));
    let norms = numbers(&[6], 4);
    let factor = (m.tensor() / &norms).unwrap();
    // Without a bias it keeps what it gives, and with one what it was given.
    for (bias, left) in [(None, 0), (Some(&bias), 1)] {
        let scaled = tape.scale_columns(&x, &m, (&norms, &factor), bias).unwrap();
        let scaled = tape.reshape(&scaled, (1, 2, 6)).unwrap();
        let up = tape.reshape(&x, (1, 2, 6)).unwrap();
        tape.glu(&scaled, &up, glu::Activation::Silu).unwrap();
        assert_eq!(waiting(), left);
    }
}

#[test]
fn a_segment_whose_parameters_are_inside_has_a_node_though_its_input_is_frozen() {
    let tape = Tape::training().with_checkpointing(true);
    let inner = weight(random(&[3, 3], 1), 0);
    let segment: super::Segment = Arc::new(move |tape: &Tape, inputs: &[Value]| {
        Ok(vec![tape.linear(&inputs[0], &tape.parameter(&inner), None)?])
    });
    let x = tape.constant(random(&[2, 3], 2));
    let y = tape.segment(&[&x], segment).unwrap().remove(0);
    let root = weighted_sum(&tape, &y);
    assert_eq!(backward(tape, &root).len(), 1);
}

/// What came together.
#[derive(Default)]
struct Arrivals(Vec<Vec<usize>>);

impl GradientSink for Arrivals {
    fn accept(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        self.accept_all(vec![(id, gradient)])
    }

    fn accept_all(&mut self, gradients: Vec<(ParameterId, Tensor)>) -> Result<()> {
        self.0.push(gradients.iter().map(|(id, _)| id.0).collect());
        Ok(())
    }
}

#[test]
fn small_gradients_are_handed_over_together_and_all_in_one_order() {
    const LARGE: usize = 75;
    let arrivals = |checkpointing: bool| {
        let tape = Tape::training().with_checkpointing(checkpointing);
        let mut x = tape.constant(random(&[1, 2], 1));
        for id in 0..80 {
            let outer = if id == LARGE { 1 << 19 } else { 2 };
            let parameter = weight(random(&[outer, 2], 2), id);
            // Those within segments don't overtake those after them.
            let segment: super::Segment = Arc::new(move |tape: &Tape, inputs: &[Value]| {
                let y = tape.linear(&inputs[0], &tape.parameter(&parameter), None)?;
                let first = y.tensor().narrow(1, 0, 2)?.contiguous()?;
                let pad = move |dy: Tensor| Ok(vec![Some(dy.pad_with_zeros(1, 0, outer - 2)?)]);
                Ok(vec![tape.push(&[&y], first, pad)?])
            });
            x = match id % 10 < 5 {
                true => tape.segment(&[&x], segment).unwrap().remove(0),
                false => segment(&tape, &[x]).unwrap().remove(0),
            };
        }
        let root = weighted_sum(&tape, &x);
        let mut arrivals = Arrivals::default();
        tape.backward(&root, 1.0, &mut arrivals).unwrap();
        arrivals.0
    };
    for checkpointing in [false, true] {
        let arrivals = arrivals(checkpointing);
        assert!(arrivals.concat().into_iter().eq((0..80).rev()), "{arrivals:?}");
        let counts: Vec<usize> = arrivals.iter().map(Vec::len).collect();
        assert_eq!(counts, [80 - LARGE - 1, 1, 32, 32, LARGE - 64]);
    }
}

#[test]
fn every_input_gets_a_gradient_or_none_and_is_not_passed_over() {
    let tape = Tape::training();
    let x = tape.parameter(&weight(random(&[2], 1), 0));
    let sum = x.tensor().sum_all().unwrap();
    let root = tape.push(&[&x, &x], sum, |dy| Ok(vec![Some(dy.broadcast_as(2)?)])).unwrap();
    let refused =
        tape.backward(&root, 1.0, &mut |_: ParameterId, _: Tensor| -> Result<()> { Ok(()) });
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("of 2 inputs gave 1 gradients"), "{message}");
}

#[test]
fn a_linear_chain_matches_candles_autograd() {
    let (w, x) = (random(&[4, 4], 1), random(&[3, 4], 2));
    let variable = Var::from_tensor(&w).unwrap();
    let hidden = x.matmul(&variable.t().unwrap()).unwrap();
    let output = hidden.matmul(&variable.t().unwrap()).unwrap().sum_all().unwrap();
    let wanted = values(output.backward().unwrap().get(&variable).unwrap());

    let tape = Tape::training();
    let w = weight(w, 0);
    let hidden = tape.linear(&tape.constant(x), &tape.parameter(&w), None).unwrap();
    let output = tape.linear(&hidden, &tape.parameter(&w), None).unwrap();
    let sum = output.tensor().sum_all().unwrap();
    let shape = output.shape().clone();
    let root = tape.push(&[&output], sum, move |_| {
        Ok(vec![Some(Tensor::ones(shape, DType::F64, &Device::Cpu)?)])
    });
    let root = root.unwrap();
    let found = backward(tape, &root);
    for (a, b) in found[&0].iter().zip(&wanted) {
        assert!((a - b).abs() < 1e-12, "{a} {b}");
    }
}
