//! A whole model on Metal: its logits, its training and its text, against the CPU's. With the feature `metal`
//! on a Mac's GPU. Without it by the emulator: what the host passes to the kernels, and the kernels, run on
//! tensors of the CPU, nothing may be left to the CPU's operations, and the kernels that ran are those that are
//! named here.

use candle_core::{DType, Device, Tensor};
use metal_candle::Result;
use metal_candle::adapter::{Adapter, LoraConfig};
use metal_candle::autograd::{ParameterId, Tape};
use metal_candle::data::{Batch, BatchOptions, Batcher, Dataset, Example, IGNORED};
use metal_candle::engine::{Engine, EngineOptions, Event, Request};
use metal_candle::generate::{GenerateOptions, Sampler, SamplingOptions, Session};
use metal_candle::model::{Config, Model};
use metal_candle::pass::Input;
use metal_candle::train::{
    Gradients, Metric, Schedule, ScheduleOptions, TrainOptions, Trainer, Warmup,
};
use metal_candle::turns::Turns;
use metal_candle_kernels::adamw;
#[cfg(not(feature = "metal"))]
use metal_candle_kernels::emulation::{Constant, Launch};
use metal_emulator::Mode;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[cfg(not(feature = "metal"))]
#[path = "../../../kernels/src/backend/metal/tests/launch.rs"]
mod launch;

/// Calls `task` with a device on which Metal's operations compute, and gives the names of the kernels that ran
/// as well where they can be told, in a mode of the emulator.
fn on_metal<R>(mode: Mode, task: impl FnOnce(&Device) -> R) -> (R, Option<BTreeSet<&'static str>>) {
    on_metal_seen(mode, || (), task)
}

/// As [`on_metal`]; where kernels are emulated, `seen` is called before each.
#[cfg(feature = "metal")]
fn on_metal_seen<R>(
    _: Mode,
    _: impl Fn() + Send + Sync + 'static,
    task: impl FnOnce(&Device) -> R,
) -> (R, Option<BTreeSet<&'static str>>) {
    use metal_candle::devices;
    use std::sync::{Mutex, PoisonError};

    // Compiled for one device once, which one thread uses at a time.
    static DEVICE: Mutex<Option<Device>> = Mutex::new(None);
    assert!(devices::metal_count() > 0, "this test needs a Mac's GPU, and none was found");
    let mut device = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    let device = device.get_or_insert_with(|| devices::metal(0).unwrap());
    (task(device), None)
}

#[cfg(not(feature = "metal"))]
fn on_metal_seen<R>(
    mode: Mode,
    seen: impl Fn() + Send + Sync + 'static,
    task: impl FnOnce(&Device) -> R,
) -> (R, Option<BTreeSet<&'static str>>) {
    use metal_candle::devices::MetalMatmul;
    use metal_candle_kernels::emulation::{Emulator, emulate, source};
    use metal_emulator::{Library, Source};
    use std::sync::{Mutex, OnceLock};

    static LIBRARIES: [OnceLock<Library>; 3] = [const { OnceLock::new() }; 3];
    let library = LIBRARIES[mode as usize].get_or_init(|| {
        let source = Source::text("metal-candle-kernels.metal", source());
        source.compile(mode).unwrap_or_else(|error| panic!("{error}"))
    });
    let names = Arc::new(Mutex::new(BTreeSet::new()));
    let ran = names.clone();
    let run = move |launch: &Launch| -> Vec<Vec<u8>> {
        seen();
        ran.lock().unwrap().insert(launch.kernel);
        launch::run(library, launch)
    };
    let matmul = MetalMatmul::Fused;
    let emulator = Emulator { run: Arc::new(run), seed: 2, most_threads: 128, matmul };
    let result = emulate(emulator, || task(&Device::Cpu));
    let names = names.lock().unwrap().clone();
    (result, Some(names))
}

/// Asserts that these kernels ran and no others; `$` stands for the dtype.
#[track_caller]
fn assert_ran(names: Option<BTreeSet<&'static str>>, dtype: DType, expected: &[&str]) {
    let Some(names) = names else { return };
    let expected: BTreeSet<String> =
        expected.iter().map(|name| name.replace('$', dtype.as_str())).collect();
    assert_eq!(names.into_iter().map(String::from).collect::<BTreeSet<_>>(), expected);
}

/// Of [`model`].
const VOCABULARY: u32 = 72;

/// Heads that share keys, rope, a gated unit, and a head that is the embedding.
fn model(dtype: DType, device: &Device) -> Arc<Model> {
    let config = Config::from_json(
        r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 72,
            "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.2}"#,
    )
    .unwrap();
    Arc::new(Model::random(config, dtype, device, 1).unwrap())
}

fn with_adapter(dtype: DType, device: &Device) -> (Arc<Model>, Arc<Adapter>) {
    let model = model(dtype, device);
    let config = LoraConfig { rank: 4, alpha: 16.0, dropout: 0.1, ..LoraConfig::default() };
    let adapter = Adapter::new(&model, &config, 5).unwrap();
    (model, Arc::new(adapter))
}

/// Two rows: two records one after the other, and one with padding behind it.
fn batch(vocabulary: u32) -> Batch {
    let length = 13;
    let ids: Vec<u32> = (0..2 * length).map(|place| (7 * place + 3) % vocabulary).collect();
    let starts = |place: u32| if (5..length).contains(&place) { 5 } else { 0 };
    let is_padding = |place: u32| place >= length + 9;
    let places = || 0..2 * length;
    let first_key = |place: u32| match place {
        place if is_padding(place) => place - length,
        place if place < length => starts(place),
        _ => 0,
    };
    let targets: Vec<u32> =
        places()
            .map(|place| {
                if is_padding(place) || place % 4 == 0 {
                    IGNORED
                } else {
                    (place * 11) % vocabulary
                }
            })
            .collect();
    Batch {
        rows: 2,
        length: length as usize,
        tokens: places().filter(|place| !is_padding(*place)).count(),
        target_tokens: targets.iter().filter(|target| **target != IGNORED).count(),
        positions: places()
            .map(|place| if is_padding(place) { 0 } else { place % length - first_key(place) })
            .collect(),
        first_key: places().map(first_key).collect(),
        targets,
        input_ids: ids,
        ..Batch::default()
    }
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Asserts `|found - expected| <= tolerance·(1 + max |expected|)`.
#[track_caller]
fn assert_close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let most = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    assert!(most > 0.0, "{what} is zero");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(
            error <= tolerance * (1.0 + most),
            "{what}: element {index} is {found}, expected {expected} of {most} at most"
        );
    }
}

const FORWARD: &[&str] = &[
    "attention_forward_64_$",
    "embedding_forward_$",
    // Of the angles.
    "embedding_forward_f32",
    "glu_forward_$",
    "product_tiles_32_$",
    "rms_norm_forward_$",
    "rms_norm_forward_residual_$",
    "rope_rotate_$",
];

const BACKWARD: &[&str] = &[
    "flat_accumulate_f32",
    "arithmetic_scale_by_$",
    "attention_corrections_$",
    "attention_dk_dv_64_$",
    "attention_dq_64_$",
    "copy_rows_4",
    "cross_entropy_rows_$",
    "cross_entropy_scatter_$",
    "cross_entropy_sum",
    // Of the losses of rows that don't count.
    "fill_zeros",
    "glu_backward_$",
    "rms_norm_backward_$",
];

const STEP: &[&str] = &["adamw_clipped_step", "flat_norm", "flat_squares_f32"];

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn a_model_on_metal_gives_the_logits_of_the_cpu() {
    for (dtype, tolerance) in [(DType::F32, 2e-6), (DType::BF16, 2e-2), (DType::F16, 3e-3)] {
        let logits = |device: &Device| {
            let model = model(dtype, device);
            let input = Input::batch(&batch(VOCABULARY), device).unwrap();
            let hidden = model.forward(&Tape::inference(), &input);
            model.logits(hidden.unwrap().tensor(), &input).unwrap()
        };
        let (found, names) = on_metal(Mode::Asan, |device| numbers(&logits(device)));
        assert_close(&found, &numbers(&logits(&Device::Cpu)), tolerance, "logits");
        let casts = match dtype {
            DType::F32 => &[][..],
            DType::F16 => &["cast_f16_f32"],
            _ => &["cast_bf16_f32"],
        };
        assert_ran(names, dtype, &[FORWARD, casts].concat());
    }
}

/// Losses, norms and gradients of two steps, and the parameters after them.
struct Steps {
    losses: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    parameters: Vec<f32>,
}

fn train(device: &Device, dtype: DType, checkpoint: bool) -> Steps {
    let (model, adapter) = with_adapter(dtype, device);
    let store = adapter.parameters();
    let gradients = Gradients::new(store).unwrap();
    let moments = [(); 2].map(|()| store.values().zeros_like().unwrap());
    let options = adamw::Options {
        learning_rate: 0.05,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.1,
        bias_correction: true,
    };
    let mut steps = Steps { losses: Vec::new(), gradients: Vec::new(), parameters: Vec::new() };
    for step in 1..=2 {
        let tape = Tape::training().with_dropout(step as u64).with_checkpointing(checkpoint);
        let loss = model.loss(&tape, &batch(VOCABULARY), Some(&adapter)).unwrap();
        tape.backward(&loss.sum, 1.0 / loss.tokens as f64, &mut &gradients).unwrap();
        steps.losses.extend(numbers(loss.sum.tensor()));
        steps.gradients.push(numbers(gradients.buffer()));
        let norm = adamw::clipped_step(
            store.values(),
            gradients.buffer(),
            &moments[0],
            &moments[1],
            step,
            Some(0.5),
            store.decayed(),
            &options,
        );
        steps.losses.push(norm.unwrap() as f32);
        assert!(numbers(gradients.buffer()).iter().all(|gradient| *gradient == 0.0));
    }
    steps.parameters = numbers(store.values());
    steps
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn lora_steps_on_metal_are_those_of_the_cpu() {
    for (dtype, checkpoint, tolerance) in
        [(DType::F32, false, 2e-5), (DType::F32, true, 2e-5), (DType::BF16, true, 5e-2)]
    {
        let (found, names) = on_metal(Mode::Asan, |device| train(device, dtype, checkpoint));
        let expected = train(&Device::Cpu, dtype, checkpoint);
        assert_close(&found.losses, &expected.losses, tolerance, "losses and norms");
        for (found, expected) in found.gradients.iter().zip(&expected.gradients) {
            assert_close(found, expected, tolerance, "gradients");
        }
        if dtype == DType::F32 {
            // Adam's first step is the sign of a gradient, which rounding decides where there is little.
            let near = found.parameters.iter().zip(&expected.parameters);
            let near = near.filter(|(found, expected)| (*found - *expected).abs() < 1e-3).count();
            assert!(near * 100 >= 99 * found.parameters.len(), "{near} parameters are the same");
        }
        let made_again = if checkpoint { &["arithmetic_add_$"][..] } else { &[] };
        assert_ran(names, dtype, &[FORWARD, BACKWARD, STEP, made_again].concat());
    }
}

fn read(session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    session.read(tokens).unwrap().to_vec1().unwrap()
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn text_from_metal_is_that_of_the_cpu() {
    let write = |device: &Device| {
        let model = model(DType::F32, device);
        let mut session = Session::new(&model, None).unwrap();
        // Many tokens, few, and one after another.
        let prompt: Vec<u32> = (0..20).map(|index| (index * 17 + 3) % VOCABULARY).collect();
        let mut logits = read(&mut session, &prompt);
        logits.extend(read(&mut session, &[8, 30, 12]));
        let mut tokens = Vec::new();
        for _ in 0..6 {
            let last = &logits[logits.len() - VOCABULARY as usize..];
            let best =
                (0..VOCABULARY).max_by(|a, b| last[*a as usize].total_cmp(&last[*b as usize]));
            tokens.extend(best);
            logits.extend(read(&mut session, &tokens[tokens.len() - 1..]));
        }
        let mut sampler = Sampler::new(SamplingOptions {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.01,
            repetition_penalty: 1.3,
            seed: 5,
            ..SamplingOptions::default()
        })
        .unwrap();
        for _ in 0..3 {
            let next = session.read(&tokens[tokens.len() - 1..]).unwrap();
            let sampled = sampler.sample_tensor(&next, session.tokens(), &tokens).unwrap();
            logits.push(sampled.logprob as f32);
            tokens.push(sampled.id);
        }
        (tokens, logits)
    };
    let ((tokens, logits), names) = on_metal(Mode::Asan, write);
    let (expected_tokens, expected) = write(&Device::Cpu);
    assert_eq!(tokens, expected_tokens);
    assert_close(&logits, &expected, 2e-6, "logits");
    assert_ran(names, DType::F32, &[FORWARD, DECODE].concat());
}

const DECODE: &[&str] =
    &["attention_few_64_$", "few_rows_1_$", "few_rows_4_$", "sampling_choose_$", "write_rows_4"];

/// Prompts are read in steps of 8 tokens, of which the first end with no prompt, so no logits are wanted of them.
#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn prompts_that_an_engine_on_metal_reads_in_parts_go_on_as_on_the_cpu() {
    let write = |device: &Device| {
        let model = model(DType::F32, device);
        let options = EngineOptions {
            max_sequences: 2,
            max_batch_tokens: 8,
            cache_tokens: Some(128),
            ..EngineOptions::default()
        };
        let mut engine = Engine::new(&model, None, options).unwrap();
        for first in [3, 5] {
            let prompt = (0..20).map(|index| (index * 17 + first) % VOCABULARY).collect();
            let options = GenerateOptions { max_tokens: 3, ..GenerateOptions::default() };
            engine.submit(Request { prompt, options, ..Request::default() }).unwrap();
        }
        let mut tokens = Vec::new();
        while !engine.is_idle() {
            for (id, event) in engine.step() {
                match event {
                    Event::Piece(piece) => tokens.extend(piece.token.map(|token| (id, token))),
                    Event::Failed(error) => panic!("{error}"),
                    _ => {}
                }
            }
        }
        tokens
    };
    let (found, _) = on_metal(Mode::Asan, write);
    assert_eq!(found.len(), 6);
    assert_eq!(found, write(&Device::Cpu));
}

/// As a program trains: packed batches that are added up, clipping, a validation loss. Gives losses and norms, and the
/// parameters then.
fn training_run(device: &Device, turns: Option<&Arc<Turns>>) -> (Vec<f32>, Vec<f32>) {
    let examples = |count: u32, first: u32| {
        let examples: Vec<_> = (0..count)
            .map(|index| {
                let ids: Vec<u32> =
                    (0..5 + index).map(|i| (first + 3 * i + index) % VOCABULARY).collect();
                Example { trainable: ids.iter().map(|id| id % 5 > 0).collect(), ids }
            })
            .collect();
        Arc::new(Dataset::from_examples(&examples).unwrap())
    };
    let batches = |dataset| {
        let options = BatchOptions {
            batch_size: 1,
            max_seq_length: 16,
            packing: true,
            seed: 7,
            shuffle: true,
            ..BatchOptions::default()
        };
        Batcher::new(dataset, options).unwrap()
    };
    // The turn of whoever makes the adapter, as a server does.
    let turn = turns.map(|turns| turns.hold());
    let (model, adapter) = with_adapter(DType::F32, device);
    let (batches, validation) = (batches(examples(6, 1)), batches(examples(2, 30)));
    let rate = ScheduleOptions {
        schedule: Schedule::Linear,
        learning_rate: 1e-4,
        warmup: Warmup::Steps(0),
        ..ScheduleOptions::default()
    };
    let rate = rate.build(3).unwrap();
    let options = TrainOptions {
        grad_accumulation: 2,
        eval_every: 2,
        report_every: 1,
        ..TrainOptions::new(3, rate)
    };
    let output = tempfile::tempdir().unwrap();
    let trainer = Trainer::new(&model, &adapter, &batches, options, output.path(), "random");
    let mut trainer = trainer.unwrap().with_validation(&validation);
    if let Some(turns) = turns {
        trainer = trainer.with_turns(turns.clone());
    }
    drop(turn);
    let mut found = Vec::new();
    trainer
        .run(&mut |metric: &Metric| -> Result<()> {
            match metric {
                Metric::Train { loss, gradient_norm, .. } => {
                    found.extend([*loss as f32, *gradient_norm as f32]);
                }
                Metric::Evaluation { loss, .. } => found.push(*loss as f32),
                _ => {}
            }
            Ok(())
        })
        .unwrap();
    (found, numbers(adapter.parameters().values()))
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn a_training_run_on_metal_is_that_of_the_cpu() {
    let ((found, parameters), _) = on_metal(Mode::Asan, |device| training_run(device, None));
    let (expected, expected_parameters) = training_run(&Device::Cpu, None);
    assert_close(&found, &expected, 2e-5, "losses and norms");
    assert_close(&parameters, &expected_parameters, 1e-3, "parameters");
}

/// Another thread has the device again and again, for long enough that whatever training does outside its turns is done
/// meanwhile.
#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn training_on_metal_launches_nothing_while_another_has_the_device() {
    let turns = Turns::new(0.5);
    let [is_held, is_over, is_disturbed] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
    let (held, disturbed) = (is_held.clone(), is_disturbed.clone());
    let seen = move || {
        if held.load(Ordering::SeqCst) {
            disturbed.store(true, Ordering::SeqCst);
        }
    };
    let found = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                let turn = turns.hold();
                is_held.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(20));
                is_held.store(false, Ordering::SeqCst);
                drop(turn);
                // As long as others need to wake up.
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        /// Ends the other thread, also when the run panics.
        struct End(Arc<AtomicBool>);
        impl Drop for End {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let _end = End(is_over.clone());
        on_metal_seen(Mode::Asan, seen, |device| training_run(device, Some(&turns))).0
    });
    assert!(!is_disturbed.load(Ordering::SeqCst));
    let (alone, _) = on_metal(Mode::Asan, |device| training_run(device, None));
    assert_eq!(found, alone, "sharing the device changes nothing");
}

/// A random adapter for every linear layer, or every weight.
fn with_parameters(name: &str, full: bool, device: &Device) -> (Arc<Model>, Arc<Adapter>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name);
    let model = Model::load(folder, DType::F32, device).unwrap();
    if full {
        let adapter = Adapter::full(&model).unwrap();
        return (Arc::new(model.without_weights()), Arc::new(adapter));
    }
    let config = LoraConfig { rank: 3, alpha: 16.0, ..LoraConfig::default() };
    let adapter = Adapter::new(&model, &config, 5).unwrap();
    let store = adapter.parameters();
    for (index, entry) in store.entries().iter().enumerate() {
        let count = entry.shape.elem_count();
        let values = (0..count).map(|i| ((i * 37 + index) % 19) as f32 * 0.01 - 0.09);
        let values: Vec<_> = values.collect();
        let values = Tensor::from_vec(values, entry.shape.clone(), device).unwrap();
        store.set(ParameterId(index), &values).unwrap();
    }
    (Arc::new(model), Arc::new(adapter))
}

/// Windows, soft caps, biases, q/k norms, fused projections and multipliers.
#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn every_family_on_metal_gives_the_loss_gradients_and_logits_of_the_cpu() {
    let families = [
        "gemma2",
        "gemma3-text",
        "gpt-oss",
        "granite",
        "llama",
        "llama-odd",
        "ministral",
        "ministral3",
        "mistral",
        "olmo2",
        "phi3",
        "phi3-longrope",
        "qwen2",
        "qwen3",
        "qwen3-moe",
        "smollm3",
    ];
    let run = |name: &str, full: bool, device: &Device| {
        let (model, adapter) = with_parameters(name, full, device);
        let gradients = Gradients::new(adapter.parameters()).unwrap();
        let batch = batch(model.config().vocab_size as u32);
        let tape = Tape::training();
        let loss = model.loss(&tape, &batch, Some(&adapter)).unwrap();
        tape.backward(&loss.sum, 1.0 / loss.tokens as f64, &mut &gradients).unwrap();
        let mut session = Session::new(&model, Some(&adapter)).unwrap();
        let mut logits = read(&mut session, &batch.input_ids[..11]);
        logits.extend(read(&mut session, &batch.input_ids[11..12]));
        (numbers(loss.sum.tensor()), numbers(gradients.buffer()), logits)
    };
    let mut ran: Option<BTreeSet<_>> = None;
    for (name, full) in
        families.map(|name| (name, false)).into_iter().chain([("gemma2", true), ("qwen2", true)])
    {
        let (found, names) = on_metal(Mode::Plain, |device| run(name, full, device));
        let expected = run(name, full, &Device::Cpu);
        assert_close(&found.0, &expected.0, 1e-5, &format!("the loss of {name}"));
        assert_close(&found.1, &expected.1, 2e-5, &format!("the gradients of {name}"));
        assert_close(&found.2, &expected.2, 1e-5, &format!("the logits of {name}"));
        if let Some(names) = names {
            ran.get_or_insert_default().extend(names);
        }
    }
    let others = [
        "arithmetic_add_$",
        "arithmetic_scale_$",
        "arithmetic_softcap_$",
        "attention_few_64_$",
        "column_sums_$",
        "copy_strided_4",
        "embedding_backward_$",
        "experts_backward_$",
        "experts_combine_$",
        "few_rows_1_$",
        "few_rows_4_$",
        "few_rows_8_$",
        "fill_zeros",
        "rms_norm_weight_$",
        "sum_groups",
        "write_rows_4",
    ];
    assert_ran(ran, DType::F32, &[FORWARD, BACKWARD, &others].concat());
}
