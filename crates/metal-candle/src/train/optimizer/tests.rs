use super::*;
use crate::adapter::{Kept, Parameters};
use crate::model::Weights;
use crate::parallel::Group;
use crate::train::Gradients;
use candle_core::{DType, Device, Shape, Tensor};
use metal_candle_kernels::{copy, flat};

/// All optimisers, with every option at work.
pub(super) fn all() -> Vec<Optimizer> {
    vec![
        Optimizer::AdamW(AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() }),
        Optimizer::Adam(AdamOptions { bias_correction: false, ..AdamOptions::default() }),
        Optimizer::Sgd(SgdOptions::default()),
        Optimizer::Sgd(SgdOptions { momentum: 0.9, nesterov: true, ..SgdOptions::default() }),
        Optimizer::Lion(LionOptions { weight_decay: 0.1, ..LionOptions::default() }),
        Optimizer::AdamW8bit(AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() }),
        Optimizer::Adafactor(AdafactorOptions { weight_decay: 0.1, ..AdafactorOptions::default() }),
        Optimizer::Muon(MuonOptions::default()),
    ]
}

/// Two matrices and a vector.
fn parameters() -> Parameters {
    let shapes = [
        ("a.lora_A", vec![7, 5]),
        ("b", vec![3]),
        ("model.embed_tokens.weight", vec![10, 6]),
        ("c", vec![70, 80]),
        ("d", vec![64, 64]),
        ("e", vec![64, 65]),
    ]
    .map(|(name, shape)| (name.to_string(), Shape::from(shape)));
    let (store, ids) = Parameters::new(&shapes, &Device::Cpu).unwrap();
    for id in ids {
        let ones = store.view(id).unwrap().ones_like().unwrap();
        store.set(id, &ones).unwrap();
    }
    store
}

fn put_gradients(all: &Gradients, seed: u64) {
    let len = all.buffer().elem_count();
    let mut random = crate::random::SplitMix64::new(seed);
    let gradients: Vec<f32> = (0..len).map(|_| random.below(2001) as f32 / 1000.0 - 1.0).collect();
    let gradients = Tensor::from_vec(gradients, len, &Device::Cpu).unwrap();
    copy::write(all.buffer(), &gradients, 0, 0).unwrap();
}

fn numbers(store: &Parameters) -> Vec<f32> {
    store.values().to_vec1().unwrap()
}

#[test]
fn a_state_that_was_saved_and_read_takes_the_same_steps() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    for optimizer in all() {
        let (whole, parts) = (parameters(), parameters());
        let gradients = Gradients::new(&whole).unwrap();
        let state = OptimizerState::new(optimizer, &whole, Home::default()).unwrap();
        // What is kept lies in the memory of the host, where it may.
        let host = OptimizerPlacement::Host;
        let placement = host.check(&optimizer, 1).map(|()| host).unwrap_or_default();
        let home = Home { placement, ..Home::default() };
        let mut part = OptimizerState::new(optimizer, &parts, home).unwrap();
        for number in 1..=4 {
            for (store, state) in [(&whole, &state), (&parts, &part)] {
                put_gradients(&gradients, number);
                state
                    .step(store, &gradients, 1e-2, number as usize, Some(1.0), Group::default())
                    .unwrap();
            }
            let tensors = tensors(&part, &parts);
            crate::files::write_safetensors(&path, &tensors, None).unwrap();
            part = OptimizerState::load(optimizer, &parts, home, &path).unwrap();
            let bytes: u64 = tensors
                .iter()
                .map(|(_, tensor)| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64)
                .sum();
            assert_eq!(optimizer.state_bytes(parts.entries()), bytes);
        }
        assert_eq!(numbers(&whole), numbers(&parts), "{optimizer:?}");
        assert_ne!(numbers(&whole), numbers(&parameters()), "{optimizer:?}");
    }
}

#[test]
fn what_cannot_lie_elsewhere_says_what_can() {
    use OptimizerPlacement::{Device, Host, Sharded};
    for (index, optimizer) in all().into_iter().enumerate() {
        let told = |placement: OptimizerPlacement, processes| {
            placement.check(&optimizer, processes).err().map(|error| error.to_string())
        };
        assert_eq!(told(Device, 1).or(told(Device, 2)), None);
        let expected = match index {
            2 => Some("keeps nothing; expected device"),
            6 => Some("keeps next to nothing; expected device"),
            5 | 7 => Some("can't be in parts with several processes; expected device"),
            _ => None,
        };
        for placement in [Host, Sharded] {
            let found = told(placement, 2);
            assert_eq!(found.is_some(), expected.is_some(), "{optimizer:?}: {found:?}");
            let found = found.unwrap_or_default();
            assert!(found.contains(expected.unwrap_or_default()), "{optimizer:?}: {found}");
        }
        assert_eq!(told(Host, 1).is_some(), [2, 6].contains(&index), "{optimizer:?}");
        assert!(told(Sharded, 1).unwrap().contains("optimizer_placement: is sharded"));
    }
}

#[test]
fn shares_are_all_elements_once() {
    for (count, ranks) in [(0, 3), (1, 2), (64, 2), (65, 2), (1000, 3), (100_000, 7), (129, 4)] {
        let shares = state::shares(count, ranks);
        assert_eq!(shares.len(), ranks);
        assert!(shares.iter().all(|share| share.start % 64 == 0 || share.is_empty()));
        let all: Vec<usize> = shares.into_iter().flatten().collect();
        assert!(all.into_iter().eq(0..count));
    }
}

#[test]
fn the_state_of_another_optimizer_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("optimizer.safetensors");
    let store = parameters();
    for (index, saved) in all().into_iter().enumerate() {
        let state = OptimizerState::new(saved, &store, Home::default()).unwrap();
        let tensors = tensors(&state, &store);
        crate::files::write_safetensors(&path, &tensors, None).unwrap();
        for (other, loaded) in all().into_iter().enumerate() {
            let found = OptimizerState::load(loaded, &store, Home::default(), &path);
            if other == index {
                found.unwrap();
            } else {
                let error = found.unwrap_err().to_string();
                assert!(error.contains("optimizer.safetensors"), "{error}");
                assert!(error.contains(&format!("{} keeps", loaded.name())), "{error}");
            }
        }
    }
}

#[test]
fn weight_decay_leaves_vectors_alone() {
    for optimizer in all() {
        let store = parameters();
        let state = OptimizerState::new(optimizer, &store, Home::default()).unwrap();
        let gradients = Gradients::new(&store).unwrap();
        let norm = state.step(&store, &gradients, 0.5, 1, Some(1.0), Group::default()).unwrap();
        assert_eq!(norm, 0.0);
        let (matrices, vectors) = (numbers(&store), store.decayed());
        let decays = optimizer.describe().contains("weight_decay 0.1");
        assert!(matrices[..vectors].iter().all(|p| (*p != 1.0) == decays), "{optimizer:?}");
        assert!(matrices[vectors..].iter().all(|p| *p == 1.0), "{optimizer:?}");
    }
}

#[test]
fn broken_gradients_make_no_step() {
    for optimizer in all() {
        let store = parameters();
        let state = OptimizerState::new(optimizer, &store, Home::default()).unwrap();
        let before: Vec<Vec<u8>> = bytes(&store, &state);
        let all = Gradients::new(&store).unwrap();
        put_gradients(&all, 1);
        let nan = Tensor::new(&[f32::NAN], &Device::Cpu).unwrap();
        copy::write(all.buffer(), &nan, 0, 3).unwrap();
        assert!(
            !state.step(&store, &all, 1e-2, 1, Some(1.0), Group::default()).unwrap().is_finite()
        );
        assert!(numbers(&store).iter().all(|p| *p == 1.0), "{optimizer:?}");
        assert_eq!(bytes(&store, &state), before, "{optimizer:?}");
        let gradients: Vec<f32> = all.buffer().to_vec1().unwrap();
        assert!(gradients.iter().all(|g| *g == 0.0), "{optimizer:?}");
    }
}

/// Everything that is kept, by name.
fn tensors(state: &OptimizerState, store: &Parameters) -> Vec<(String, Tensor)> {
    let kept = state.all_kept(store).unwrap().into_iter();
    let whole = |kept: Kept| kept.whole(Group::default(), store.values().device()).unwrap();
    kept.filter_map(|(name, kept)| Some((name, whole(kept)?))).collect()
}

/// Everything that is kept, as text of its numbers.
fn bytes(store: &Parameters, state: &OptimizerState) -> Vec<Vec<u8>> {
    let tensors = tensors(state, store);
    tensors.iter().map(|(_, tensor)| format!("{tensor:?}{tensor}").into_bytes()).collect()
}

#[test]
fn options_that_make_no_sense_are_named() {
    let sgd = SgdOptions { momentum: 0.9, ..SgdOptions::default() };
    let adam = AdamOptions::default();
    let lion = LionOptions::default();
    for (optimizer, expected) in [
        (Optimizer::Adam(AdamOptions { beta1: 1.0, ..adam }), "beta1: is 1,"),
        (Optimizer::Adam(AdamOptions { epsilon: 0.0, ..adam }), "epsilon: is 0,"),
        (Optimizer::Adam(AdamOptions { epsilon: 1e-46, ..adam }), "epsilon: is 1e-46, expected"),
        (Optimizer::Sgd(SgdOptions { momentum: -0.1, ..sgd }), "momentum: is -0.1,"),
        (Optimizer::Sgd(SgdOptions { nesterov: true, momentum: 0.0, ..sgd }), "nesterov: needs"),
        (Optimizer::Sgd(SgdOptions { nesterov: true, dampening: 0.1, ..sgd }), "nesterov: needs"),
        (Optimizer::Lion(LionOptions { beta2: f64::NAN, ..lion }), "beta2: is NaN,"),
        (Optimizer::Lion(LionOptions { weight_decay: -1.0, ..lion }), "weight_decay: is -1,"),
        (
            Optimizer::Adafactor(AdafactorOptions { warmup_init: true, ..Default::default() }),
            "warmup_init: needs relative_step",
        ),
        (
            Optimizer::Adafactor(AdafactorOptions { decay_rate: 0.8, ..Default::default() }),
            "decay_rate: is 0.8,",
        ),
        (Optimizer::Muon(MuonOptions { ns_steps: 0, ..Default::default() }), "ns_steps: is 0,"),
        (Optimizer::Muon(MuonOptions { momentum: 0.0, ..Default::default() }), "nesterov: needs"),
    ] {
        let error = optimizer.validate().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for optimizer in all() {
        optimizer.validate().unwrap();
    }
}

#[test]
fn a_description_names_every_option() {
    let text = Optimizer::default().describe();
    for expected in ["adamw ", "beta1 0.9", "beta2 0.999", "epsilon 1e-8", "weight_decay 0.01"] {
        assert!(text.contains(expected), "{text}");
    }
    let text = Optimizer::Muon(MuonOptions::default()).describe();
    assert!(text.contains("nesterov true") && text.contains("ns_steps 5"), "{text}");
}

#[test]
fn moments_of_8_bits_take_a_quarter_and_small_tensors_keep_theirs() {
    let store = parameters();
    let options = AdamWOptions::default();
    // c has 5600 elements, d 4096 and e 4160; d and e are one run, c another as its last block isn't whole.
    let (short, blocks) = (5600 + 4096 + 4160, 22 + 16 + 17);
    let whole = store.len() - short;
    assert_eq!(
        Optimizer::AdamW8bit(options).state_bytes(store.entries()) as usize,
        2 * (short + 4 * blocks + 4 * whole)
    );
    assert_eq!(Optimizer::AdamW(options).state_bytes(store.entries()) as usize, 8 * store.len());
}

#[test]
fn outputs_and_inputs_are_told_apart() {
    let entry = |name: &str, shape: &[usize]| Entry {
        name: name.into(),
        shape: Shape::from(shape.to_vec()),
        offset: 0,
    };
    for (name, shape, hidden, ratio) in [
        ("layers.0.q_proj.lora_A", [64, 8], true, 8.0 / 64.0),
        ("layers.0.q_proj.lora_B", [8, 64], true, 8.0),
        ("layers.0.q_proj.weight", [64, 32], true, 2.0),
        ("model.embed_tokens.weight", [64, 32], false, 2.0),
        ("lm_head.weight", [64, 32], false, 2.0),
    ] {
        let entry = entry(name, &shape);
        assert_eq!(state::is_hidden_matrix(&entry), hidden, "{name}");
        assert_eq!(state::outputs_per_input(&entry), ratio, "{name}");
    }
    assert!(!state::is_hidden_matrix(&entry("norm.weight", &[64])));
}

fn fixture() -> Weights {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/optimizers/steps.safetensors");
    Weights::from_files([path]).unwrap()
}

/// The parameters of a fixture, the largest difference to `case` after its steps, and how far they moved.
fn follow(prefix: &str, case: &str, names: &[&str], optimizer: Optimizer, rate: f64) -> Vec<f64> {
    let weights = fixture();
    let read = |name: &str| {
        let shape = weights.shape(name).unwrap().to_vec();
        weights.tensor(name, &shape, DType::F32, &Device::Cpu).unwrap()
    };
    let shapes: Vec<(String, Shape)> = names
        .iter()
        .map(|name| (name.to_string(), read(&format!("{prefix}parameters.{name}")).shape().clone()))
        .collect();
    let (store, ids) = Parameters::new(&shapes, &Device::Cpu).unwrap();
    for (id, name) in ids.iter().zip(names) {
        store.set(*id, &read(&format!("{prefix}parameters.{name}"))).unwrap();
    }
    let all = Gradients::new(&store).unwrap();
    let state = OptimizerState::new(optimizer, &store, Home::default()).unwrap();
    for number in 0..4 {
        for (id, name) in ids.iter().zip(names) {
            let gradient = read(&format!("{prefix}gradients.{number}.{name}"));
            flat::accumulate(&all.view(*id).unwrap(), &gradient, 1.0).unwrap();
        }
        state.step(&store, &all, rate, number + 1, None, Group::default()).unwrap();
    }
    let mut off = Vec::new();
    for (id, name) in ids.iter().zip(names) {
        let found: Vec<f32> = store.view(*id).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let expected: Vec<f32> =
            read(&format!("{prefix}{case}.{name}")).flatten_all().unwrap().to_vec1().unwrap();
        off.extend(found.iter().zip(expected).map(|(a, b)| f64::from((a - b).abs())));
    }
    off
}

/// PyTorch, transformers, MLX and lion-pytorch take the same steps.
#[test]
fn steps_are_those_of_the_fields_implementations() {
    let adam = AdamOptions { beta1: 0.8, beta2: 0.95, epsilon: 1e-6, bias_correction: true };
    let AdamOptions { beta1, beta2, epsilon, bias_correction } = adam;
    let adamw = AdamWOptions { beta1, beta2, epsilon, weight_decay: 0.1, bias_correction };
    let sgd = SgdOptions { weight_decay: 0.1, ..SgdOptions::default() };
    let momentum = SgdOptions { momentum: 0.9, dampening: 0.2, ..sgd };
    let nesterov = SgdOptions { momentum: 0.9, nesterov: true, ..sgd };
    let adafactor = AdafactorOptions { weight_decay: 0.1, ..AdafactorOptions::default() };
    let relative = AdafactorOptions {
        scale_parameter: true,
        relative_step: true,
        clip_threshold: 0.5,
        decay_rate: -0.6,
        ..adafactor
    };
    let muon = MuonOptions { momentum: 0.9, weight_decay: 0.0, ..MuonOptions::default() };
    let all: &[&str] = &["wide", "tall", "vector"];
    // MLX's Muon moves vectors by their momentum.
    let matrices: &[&str] = &["wide", "tall"];
    for (case, optimizer, rate, names) in [
        ("adam", Optimizer::Adam(adam), 1e-2, all),
        (
            "adam_uncorrected",
            Optimizer::Adam(AdamOptions { bias_correction: false, ..adam }),
            1e-2,
            all,
        ),
        ("adamw", Optimizer::AdamW(adamw), 1e-2, all),
        ("sgd", Optimizer::Sgd(sgd), 0.1, all),
        ("sgd_momentum", Optimizer::Sgd(momentum), 0.1, all),
        ("sgd_nesterov", Optimizer::Sgd(nesterov), 0.1, all),
        (
            "lion",
            Optimizer::Lion(LionOptions { beta1: 0.8, beta2: 0.95, weight_decay: 0.1 }),
            1e-2,
            all,
        ),
        ("adafactor", Optimizer::Adafactor(adafactor), 1e-2, all),
        ("adafactor_relative", Optimizer::Adafactor(relative), 1.0, all),
        ("muon", Optimizer::Muon(muon), 1e-2, matrices),
        ("muon_plain", Optimizer::Muon(MuonOptions { nesterov: false, ..muon }), 1e-2, matrices),
    ] {
        let most = follow("", case, names, optimizer, rate).into_iter().fold(0.0, f64::max);
        assert!(most < 2e-6, "{case}: {most:e}");
    }
}

/// The published algorithm of bitsandbytes; where a moment is next to the middle of two levels, rounding
/// decides.
#[test]
fn steps_in_8_bits_are_those_of_bitsandbytes() {
    let options = AdamWOptions {
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-6,
        weight_decay: 0.1,
        bias_correction: true,
    };
    let off = follow("8bit.", "adamw", &["large", "vector"], Optimizer::AdamW8bit(options), 1e-2);
    let others = off.iter().filter(|off| **off > 2e-6).count();
    assert!(others * 500 <= off.len(), "{others} of {} are off", off.len());
    // AdamW's own steps are others.
    let whole = follow("8bit.", "adamw", &["large", "vector"], Optimizer::AdamW(options), 1e-2);
    let others = whole.iter().filter(|off| **off > 2e-6).count();
    assert!(others * 2 > whole.len(), "{others} of {} are off", whole.len());
}

#[test]
fn lora_plus_moves_every_b_and_vector_at_its_own_rate() {
    let shapes = [
        ("x.lora_A", vec![7, 5]),
        ("x.lora_B", vec![5, 6]),
        ("bias", vec![3]),
        ("y.lora_embedding_B", vec![4, 3]),
    ];
    let shapes = shapes.map(|(name, shape)| (name.to_string(), Shape::from(shape)));
    let options = AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() };
    let steps = |rates: &[Rates]| {
        let (parameters, _) = Parameters::new(&shapes, &Device::Cpu).unwrap();
        let all = Gradients::new(&parameters).unwrap();
        let state =
            OptimizerState::new(Optimizer::AdamW(options), &parameters, Home::default()).unwrap();
        for (index, rates) in rates.iter().enumerate() {
            put_gradients(&all, 7 + index as u64);
            state.step(&parameters, &all, *rates, index + 1, Some(0.7), Group::default()).unwrap();
            assert!(all.buffer().to_vec1::<f32>().unwrap().iter().all(|g| *g == 0.0));
        }
        let entries = parameters.entries().to_vec();
        entries.into_iter().map(move |entry| {
            (
                entry.name.clone(),
                entry
                    .of(parameters.values())
                    .unwrap()
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap(),
            )
        })
    };
    let plus = Rates { base: 1e-2, b_ratio: 16.0 };
    let (slow, fast): (Vec<_>, Vec<_>) =
        (steps(&[1e-2.into(); 3]).collect(), steps(&[(16.0 * 1e-2).into(); 3]).collect());
    for (index, (name, found)) in steps(&[plus; 3]).enumerate() {
        let is_fast = ["x.lora_B", "bias"].contains(&name.as_str());
        let expected = if is_fast { &fast[index].1 } else { &slow[index].1 };
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-6, "{name}: {found}, expected {expected}");
        }
    }
}
