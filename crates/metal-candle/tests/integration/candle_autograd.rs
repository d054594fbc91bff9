//! A model that stays with Candle's own autograd learns as one on the tape does: a decoder layer with
//! LoRA and a head, written twice over the same kernels.

use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore};
use metal_candle::autograd::{
    HeadValues, LoraValues, Matrix, Parameter, ParameterId, ProjectionValues, Tape, Value,
};
use metal_candle_kernels::glu::Activation;
use metal_candle_kernels::lora_linear::{Dropout, Lora};
use metal_candle_kernels::{
    attention, cross_entropy, embedding, glu, layer_norm, lora_linear, matmul, rms_norm, rope,
    softmax,
};

const BATCH: usize = 2;
const SEQ: usize = 5;
const HIDDEN: usize = 12;
const WIDTH: usize = 20;
const VOCABULARY: usize = 17;
const RANK: usize = 3;
const SCALE: f64 = 0.7;
const EPSILON: f64 = 1e-5;
const ATTENTION: attention::Options =
    attention::Options { scale: 0.5, softcap: Some(5.0), window: None, sinks: None };
const HEAD: cross_entropy::Options =
    cross_entropy::Options { softcap: Some(8.0), logit_scale: 1.3, chunk: 3, statistics: false };

fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed + 1;
    let values: Vec<f64> = (0..shape.iter().product::<usize>())
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// What isn't trained.
struct Frozen {
    linears: Vec<Tensor>,
    ids: Tensor,
    targets: Vec<u32>,
    cos: Tensor,
    sin: Tensor,
}

/// Input and output size of the linear layers q, k, v, o, gate, up, down.
const LINEARS: [(usize, usize); 7] = [
    (HIDDEN, HIDDEN),
    (HIDDEN, HIDDEN / 3),
    (HIDDEN, HIDDEN / 3),
    (HIDDEN, HIDDEN),
    (HIDDEN, WIDTH),
    (HIDDEN, WIDTH),
    (WIDTH, HIDDEN),
];

impl Frozen {
    fn new() -> Self {
        let linears = LINEARS.iter().zip(10..).map(|((i, o), seed)| random(&[*o, *i], seed));
        let ids: Vec<u32> = (0..BATCH * SEQ).map(|i| (i * 7 % VOCABULARY) as u32).collect();
        let targets: Vec<u32> = (0..BATCH * SEQ)
            .map(|i| if i == 3 { cross_entropy::IGNORE } else { (i * 5 % VOCABULARY) as u32 })
            .collect();
        let angles = random(&[BATCH, SEQ, 2], 30);
        Frozen {
            linears: linears.collect(),
            ids: Tensor::from_vec(ids, (BATCH, SEQ), &Device::Cpu).unwrap(),
            targets,
            cos: angles.cos().unwrap(),
            sin: angles.sin().unwrap(),
        }
    }
}

/// The trained tensors: table, two norms, bias of the last norm's linear layer, head, then A and B of
/// each linear layer.
fn trained() -> Vec<Tensor> {
    let mut tensors = vec![
        random(&[VOCABULARY, HIDDEN], 40),
        random(&[HIDDEN], 41),
        random(&[HIDDEN], 42),
        random(&[HIDDEN, HIDDEN], 43),
        random(&[HIDDEN], 44),
        random(&[VOCABULARY, HIDDEN], 45),
    ];
    for ((input, output), seed) in LINEARS.iter().zip(50..) {
        tensors.push(random(&[*input, RANK], seed));
        tensors.push(random(&[RANK, *output], seed + 20));
    }
    tensors
}

/// The first linear layer has dropout.
fn dropout(index: usize) -> Option<Dropout> {
    (index == 0).then_some(Dropout { probability: 0.3, seed: 5 })
}

fn candle_loss(frozen: &Frozen, p: &[Tensor]) -> Result<Tensor> {
    let lora = |x: &Tensor, index: usize| {
        let (a, b) = (&p[6 + 2 * index], &p[7 + 2 * index]);
        let lora = Lora { a, b, scale: SCALE, dropout: dropout(index) };
        lora_linear::differentiable(x, &frozen.linears[index], None, &lora)
    };
    let heads = |x: Tensor, count: usize| x.reshape((BATCH, SEQ, count, 4));
    let x = embedding::differentiable(&p[0], &frozen.ids)?;
    let normed = rms_norm::differentiable(&x, &p[1], EPSILON, 1.0)?;
    let q = rope::differentiable(&heads(lora(&normed, 0)?, 3)?, &frozen.cos, &frozen.sin)?;
    let k = rope::differentiable(&heads(lora(&normed, 1)?, 1)?, &frozen.cos, &frozen.sin)?;
    let v = heads(lora(&normed, 2)?, 1)?;
    let attended = attention::differentiable(&q, &k, &v, None, &ATTENTION)?;
    let x = (x + lora(&attended.reshape((BATCH, SEQ, HIDDEN))?, 3)?)?;
    let normed = rms_norm::differentiable(&x, &p[2], EPSILON, 0.0)?;
    let gated = glu::differentiable(&lora(&normed, 4)?, &lora(&normed, 5)?, Activation::Silu)?;
    let x = (x + lora(&gated, 6)?)?;
    let x = matmul::differentiable(&x, &p[3], Some(&p[4]))?.reshape((BATCH * SEQ, HIDDEN))?;
    Ok(cross_entropy::differentiable(&x, &p[5], &frozen.targets, &HEAD)?.0)
}

fn tape_loss(tape: &Tape, frozen: &Frozen, p: &[Parameter]) -> metal_candle::Result<Value> {
    let lora = |x: &Value, index: usize| {
        let (a, b) = (tape.parameter(&p[6 + 2 * index]), tape.parameter(&p[7 + 2 * index]));
        let lora = LoraValues { a: &a, b: &b, scale: SCALE, dropout: dropout(index) };
        let weight = Matrix::Dense(tape.constant(frozen.linears[index].clone()));
        let layer = ProjectionValues { weight: &weight, bias: None, lora: Some(lora) };
        Ok(tape.projections(x, &[layer])?.remove(0)) as metal_candle::Result<Value>
    };
    let heads = |x: &Value, count: usize| tape.reshape(x, (BATCH, SEQ, count, 4));
    let value = |index: usize| tape.parameter(&p[index]);
    let x = tape.embedding(&value(0), &frozen.ids)?;
    let normed = tape.rms_norm(&x, &value(1), EPSILON, 1.0)?;
    let q = heads(&lora(&normed, 0)?, 3)?;
    let k = heads(&lora(&normed, 1)?, 1)?;
    let (q, k) = tape.rope(&q, &k, &frozen.cos, &frozen.sin)?;
    let v = heads(&lora(&normed, 2)?, 1)?;
    let attended = tape.attention([&q, &k, &v], None, None, &ATTENTION)?;
    let attended = lora(&tape.reshape(&attended, (BATCH, SEQ, HIDDEN))?, 3)?;
    let (x, normed) = tape.rms_norm_residual(&x, &attended, &value(2), EPSILON, 0.0)?;
    let gated = tape.glu(&lora(&normed, 4)?, &lora(&normed, 5)?, Activation::Silu)?;
    let x = tape.add(&x, &lora(&gated, 6)?)?;
    let x = tape.linear(&x, &value(3), Some(&value(4)))?;
    let x = tape.reshape(&x, (BATCH * SEQ, HIDDEN))?;
    let head = HeadValues { hidden: &x, weight: &value(5), update: None };
    let targets = cross_entropy::Targets::new(&frozen.targets);
    Ok(tape.cross_entropy(&head, &targets, &HEAD)?.sum)
}

fn tape_gradients(frozen: &Frozen, parameters: &[Tensor]) -> (f64, Vec<Tensor>) {
    let weights: Vec<Parameter> = parameters
        .iter()
        .enumerate()
        .map(|(id, tensor)| Parameter::new(tensor.clone(), ParameterId(id)))
        .collect();
    let tape = Tape::training();
    let loss = tape_loss(&tape, frozen, &weights).unwrap();
    let mut found: Vec<Tensor> = parameters.iter().map(|p| p.zeros_like().unwrap()).collect();
    tape.backward(&loss, 0.5, &mut |id: ParameterId, gradient: Tensor| {
        found[id.0] = (&found[id.0] + gradient)?;
        Ok(())
    })
    .unwrap();
    (loss.tensor().to_scalar().unwrap(), found)
}

fn assert_close(actual: &Tensor, expected: &Tensor, what: &str) {
    let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    assert_eq!(actual.dims(), expected.dims(), "{what}");
    for (actual, expected) in flat(actual).into_iter().zip(flat(expected)) {
        let error = (actual - expected).abs();
        assert!(error <= 1e-10 * (1.0 + expected.abs()), "{what}: {actual} is not {expected}");
    }
}

#[test]
fn a_model_in_candles_autograd_learns_as_on_the_tape() {
    let frozen = Frozen::new();
    let mut on_tape = trained();
    let variables: Vec<Var> = on_tape.iter().map(|t| Var::from_tensor(t).unwrap()).collect();
    let mut losses = Vec::new();
    for step in 0..8 {
        let tensors: Vec<Tensor> = variables.iter().map(|v| v.as_tensor().clone()).collect();
        let loss = candle_loss(&frozen, &tensors).unwrap();
        let gradients: GradStore = loss.affine(0.5, 0.0).unwrap().backward().unwrap();
        let (tape_loss, tape_gradients) = tape_gradients(&frozen, &on_tape);
        let loss = loss.to_scalar::<f64>().unwrap();
        assert!((loss - tape_loss).abs() <= 1e-10 * loss.abs(), "{loss} is not {tape_loss}");
        losses.push(loss);
        for (index, (variable, expected)) in variables.iter().zip(&tape_gradients).enumerate() {
            let gradient = gradients.get(variable).unwrap();
            assert_close(gradient, expected, &format!("step {step}, parameter {index}"));
            let moved = (variable.as_tensor() - (gradient * 0.01).unwrap()).unwrap();
            variable.set(&moved).unwrap();
            on_tape[index] = (&on_tape[index] - (expected * 0.01).unwrap()).unwrap();
        }
    }
    assert!(losses[7] < 0.9 * losses[0], "{losses:?}");
}

#[test]
fn what_is_frozen_gets_no_gradient() {
    let (x, w) = (Var::from_tensor(&random(&[4, 6], 1)).unwrap(), random(&[5, 6], 2));
    let y = matmul::differentiable(&x, &w, None).unwrap();
    let gradients = y.sum_all().unwrap().backward().unwrap();
    assert!(gradients.get(&x).is_some() && gradients.get(&w).is_none());
    let frozen = random(&[4, 6], 1);
    assert!(!matmul::differentiable(&frozen, &w, None).unwrap().track_op());
}

#[test]
fn other_precisions_train_too() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let variable = |shape: &[usize], seed| {
            Var::from_tensor(&random(shape, seed).to_dtype(dtype).unwrap()).unwrap()
        };
        let (x, weight, bias) = (variable(&[3, 8], 1), variable(&[8], 2), variable(&[8], 3));
        let (w, c) = (variable(&[8, 8], 4), variable(&[8], 5));
        let y = layer_norm::differentiable(&x, &weight, Some(&bias), 1e-5).unwrap();
        let y = matmul::differentiable(&y, &w, Some(&c)).unwrap();
        let y = softmax::differentiable(&y).unwrap();
        let y = glu::differentiable(&y, &x, Activation::GeluTanh).unwrap();
        let gradients = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        for variable in [&x, &weight, &bias, &w, &c] {
            let gradient = gradients.get(variable).unwrap();
            assert_eq!((gradient.dims(), gradient.dtype()), (variable.dims(), dtype));
            let largest = gradient.to_dtype(DType::F32).unwrap().abs().unwrap().max_all().unwrap();
            let largest = largest.to_scalar::<f32>().unwrap();
            assert!(largest.is_finite() && largest > 0.0, "{largest}");
        }
    }
}
