//! Bases whose matrices lie elsewhere than on their device: in the memory of the host, or in parts with several ranks,
//! which are threads here.

use crate::common::device;
use crate::objectives;
use crate::quantized::{IDS, config, gradients, logits, saved, with_experts};
use crate::training::{base, batcher, dataset, learning_rate, options, steady};
use candle_core::{DType, Device, Tensor};
use metal_candle::adapter::{Adapter, LoraConfig, Merged, StartFrom};
use metal_candle::autograd::ParameterId;
use metal_candle::data::{BatchOptions, Batcher, Dataset};
use metal_candle::generate::Session;
use metal_candle::model::{Holding, Model, Placement, Shards};
use metal_candle::parallel::{Collectives, Group};
use metal_candle::train::objectives::{DpoOptions, KtoOptions};
use metal_candle::train::{
    AdamWOptions, LionOptions, Metric, MuonOptions, Objective, Optimizer, OptimizerPlacement,
    Outcome, SgdOptions, TrainOptions, Trainer, evaluate,
};
use metal_candle::{Error, Result};
use serde_json::json;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// To and from a rank.
type Way = (Sender<Vec<Tensor>>, Mutex<Receiver<Vec<Tensor>>>);

/// One of several threads that talk as ranks do.
#[derive(Debug)]
struct Thread {
    rank: usize,
    ways: Vec<Way>,
    gathered: AtomicU64,
}

impl Thread {
    fn all(count: usize) -> Vec<Arc<Self>> {
        let mut senders: Vec<Vec<_>> = (0..count).map(|_| Vec::new()).collect();
        let mut receivers: Vec<Vec<_>> = (0..count).map(|_| Vec::new()).collect();
        for senders in &mut senders {
            for receivers in &mut receivers {
                let (sender, receiver) = channel();
                senders.push(sender);
                receivers.push(Mutex::new(receiver));
            }
        }
        let ways = senders.into_iter().zip(receivers);
        let threads = ways.enumerate().map(|(rank, (senders, receivers))| {
            let ways = senders.into_iter().zip(receivers).collect();
            Arc::new(Self { rank, ways, gathered: AtomicU64::new(0) })
        });
        threads.collect()
    }

    /// What each rank gives.
    fn exchange(&self, mine: Vec<Tensor>) -> Result<Vec<Vec<Tensor>>> {
        let lost = |rank| Error::Rank { rank, message: "is lost".into() };
        for (rank, (sender, _)) in self.ways.iter().enumerate() {
            sender.send(mine.clone()).map_err(|_| lost(rank))?;
        }
        let ranks = self.ways.iter().enumerate().map(|(rank, (_, receiver))| {
            let receiver = receiver.lock().unwrap();
            receiver.recv_timeout(Duration::from_secs(120)).map_err(|_| lost(rank))
        });
        ranks.collect()
    }
}

impl Shards for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.ways.len()
    }

    fn begin(&self, parts: &[Tensor]) -> Result<Vec<Tensor>> {
        self.gathered.fetch_add(1, Ordering::Relaxed);
        let ranks = self.exchange(parts.to_vec())?;
        let whole = |index: usize| {
            let parts: Vec<&Tensor> = ranks.iter().map(|parts| &parts[index]).collect();
            Ok(Tensor::cat(&parts, 0)?)
        };
        (0..parts.len()).map(whole).collect()
    }

    fn begin_sum(&self, buffer: &Tensor) -> Result<()> {
        Collectives::sum(self, "parts", buffer)?;
        // The rest is nobody's.
        let part = buffer.elem_count() / self.ways.len();
        let rest = Tensor::full(f32::NAN, part, buffer.device())?;
        for rank in (0..self.ways.len()).filter(|rank| *rank != self.rank) {
            buffer.slice_set(&rest, 0, rank * part)?;
        }
        Ok(())
    }

    fn end_sum(&self) -> Result<()> {
        Ok(())
    }

    fn end(&self) -> Result<()> {
        Ok(())
    }
}

impl Collectives for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.ways.len()
    }

    fn gather(&self, _: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mine = Tensor::new(mine, &Device::Cpu)?;
        let ranks = self.exchange(vec![mine])?;
        ranks.iter().map(|parts| Ok(parts[0].to_vec1()?)).collect()
    }

    fn sum(&self, _: &'static str, buffer: &Tensor) -> Result<()> {
        let mut sum: Option<Tensor> = None;
        for parts in self.exchange(vec![buffer.copy()?])? {
            sum = Some(match sum {
                Some(sum) => (sum + &parts[0])?,
                None => parts[0].clone(),
            });
        }
        // Nobody writes before all have read.
        self.exchange(Vec::new())?;
        Ok(buffer.slice_set(&sum.unwrap(), 0, 0)?)
    }

    fn spread(&self, _: &'static str, buffer: &Tensor, parts: &[Range<usize>]) -> Result<()> {
        let own = &parts[self.rank];
        let mine = buffer.narrow(0, own.start, own.len())?.force_contiguous()?;
        for (part, given) in parts.iter().zip(self.exchange(vec![mine])?) {
            if !part.is_empty() {
                buffer.slice_set(&given[0], 0, part.start)?;
            }
        }
        Ok(())
    }

    fn takes(&self, _: &Device) -> bool {
        true
    }

    fn sums_beside_work(&self) -> bool {
        true
    }
}

/// What `work` gives as each of so many ranks.
fn as_ranks<T: Send>(count: usize, work: impl Fn(&Arc<Thread>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = Thread::all(count)
            .into_iter()
            .map(|thread| scope.spawn(|| work(&{ thread })))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn load(folder: &Path, word: Option<&str>, placement: Placement) -> Arc<Model> {
    let quantization = word.map(|word| word.parse().unwrap());
    let holding = Holding { quantization, placement };
    Arc::new(Model::load_with(folder, DType::F32, &device(), holding).unwrap())
}

/// All that a model with an adapter computes, in bits.
fn computed(model: &Arc<Model>, lora: &LoraConfig) -> Vec<Vec<f32>> {
    let adapter = Arc::new(Adapter::new(model, lora, 3).unwrap());
    let parameters = adapter.parameters();
    let begun: Vec<f32> = parameters.values().to_vec1().unwrap();
    let numbers = begun.iter().enumerate();
    let numbers = numbers.map(|(index, it)| it + ((index * 37 % 101) as f32 - 50.0) * 1e-3);
    let numbers = Tensor::from_iter(numbers, model.device()).unwrap();
    parameters.values().slice_set(&numbers, 0, 0).unwrap();
    parameters.changed();
    let mut session = Session::new(model, Some(&adapter)).unwrap();
    session.read(&IDS[..5]).unwrap();
    let next = session.continue_with(&IDS[..6]).unwrap();
    vec![
        begun,
        logits(model, None),
        logits(model, Some(&adapter)),
        gradients(model, &adapter, true),
        next.flatten_all().unwrap().to_vec1().unwrap(),
    ]
}

fn assert_alike(name: &str, model: &Model, plain: &Model) {
    assert!(model.is_away() && !plain.is_away(), "{name}");
    assert_eq!(model.fingerprint().unwrap(), plain.fingerprint().unwrap(), "{name}");
    assert_eq!(model.size_in_bytes(), plain.size_in_bytes(), "{name}");
    assert_eq!(model.is_quantized(), plain.is_quantized(), "{name}");
}

#[test]
fn weights_that_come_for_their_layer_compute_the_same_bits() {
    let folder = saved(json!({ "num_hidden_layers": 3, "attention_bias": true }));
    let mixture = saved(with_experts());
    let dora = LoraConfig { dora: true, ..LoraConfig::default() };
    let pissa = LoraConfig { start: StartFrom::Pissa, ..LoraConfig::default() };
    let cases = [
        (&folder, None, LoraConfig::default()),
        (&folder, None, dora),
        (&folder, None, pissa),
        (&folder, Some("nf4"), LoraConfig::default()),
        (&folder, Some("mlx4"), LoraConfig::default()),
        (&folder, Some("q4_k"), LoraConfig::default()),
        (&folder, Some("q8_0"), LoraConfig::default()),
        (&folder, Some("nvfp4"), LoraConfig::default()),
        (&mixture, None, LoraConfig::default()),
        (&mixture, Some("q4_k"), LoraConfig::default()),
    ];
    for (folder, word, lora) in cases {
        let name = format!("{word:?} {:?}", lora.start);
        let plain = load(folder.path(), word, Placement::Device);
        let expected = computed(&plain, &lora);
        assert!(expected.iter().flatten().any(|number| *number != 0.0));
        let model = load(folder.path(), word, Placement::Host);
        assert_alike(&name, &model, &plain);
        assert!(computed(&model, &lora) == expected, "{name} in the host's memory");
        for count in [2, 3] {
            for (rank, found) in as_ranks(count, |thread| {
                let model = load(folder.path(), word, Placement::Sharded(thread.clone()));
                assert_alike(&name, &model, &plain);
                assert!(model.is_sharded());
                computed(&model, &lora)
            })
            .into_iter()
            .enumerate()
            {
                assert!(found == expected, "{name}, rank {rank} of {count}");
            }
        }
    }
}

#[test]
fn a_layer_is_put_together_once_in_each_direction() {
    let folder = saved(json!({ "num_hidden_layers": 4 }));
    as_ranks(2, |thread| {
        let model = load(folder.path(), None, Placement::Sharded(thread.clone()));
        let adapter = Arc::new(Adapter::new(&model, &LoraConfig::default(), 3).unwrap());
        let count = || thread.gathered.swap(0, Ordering::Relaxed);
        count();
        gradients(&model, &adapter, true);
        // The last layer is still there when the backward pass begins.
        assert_eq!(count(), 4 + 3);
        gradients(&model, &adapter, true);
        assert_eq!(count(), 3 + 3);
        // The backward pass ends where nothing is trained below.
        let last = LoraConfig { last_layers: Some(2), ..LoraConfig::default() };
        let adapter = Arc::new(Adapter::new(&model, &last, 3).unwrap());
        gradients(&model, &adapter, true);
        count();
        gradients(&model, &adapter, true);
        assert_eq!(count(), 4 + 1);
        // Every weight: the embedding and the head are put together, too, and with the head the last layer is gone.
        let adapter = Arc::new(Adapter::full(&model).unwrap());
        let model = Arc::into_inner(model).unwrap().without_weights();
        count();
        gradients(&model, &adapter, true);
        assert_eq!(count(), 6 + 4);
        gradients(&model, &adapter, false);
        assert_eq!(count(), 6);
    });
}

#[test]
fn what_needs_all_weights_at_once_says_so() {
    let folder = saved(json!({}));
    let model = load(folder.path(), None, Placement::Host);
    let adapter = Arc::new(Adapter::new(&model, &LoraConfig::default(), 3).unwrap());
    let batches = batcher(dataset(8, 1), 4, false);
    let output = tempfile::tempdir().unwrap();
    let options = TrainOptions { grad_checkpoint: false, ..options() };
    let mut trainer =
        Trainer::new(&model, &adapter, &batches, options, output.path(), "llama").unwrap();
    let error = trainer.run(&mut |_: &Metric| Ok(())).unwrap_err().to_string();
    assert!(error.contains("grad_checkpoint: is off"), "{error}");
    // Everything else comes for it.
    let written = tempfile::tempdir().unwrap();
    model.save(written.path(), DType::F32, None).unwrap();
    let plain = load(folder.path(), None, Placement::Device);
    let again = load(written.path(), None, Placement::Device);
    assert_eq!(logits(&again, None), logits(&plain, None));
    let placed = Model::from_fn_with(
        config(json!({})),
        DType::F32,
        &device(),
        Holding { quantization: None, placement: Placement::Host },
        |_, shape| Ok(Tensor::ones(shape, DType::F32, &device())?),
    );
    assert!(placed.unwrap().dequantize().is_ok_and(|model| !model.is_away()));
}

/// The events and the parameters of a run of two ranks, as the first one sees them.
fn trained(
    is_sharded: bool,
    batches: &Batcher,
    validation: &Batcher,
    options: &TrainOptions,
) -> Result<(Vec<String>, Vec<f32>)> {
    let output = tempfile::tempdir().unwrap();
    let mut ranks = as_ranks(2, |thread| -> Result<_> {
        let placement = match is_sharded {
            true => Placement::Sharded(thread.clone()),
            false => Placement::Device,
        };
        let model = load(&base(), None, placement);
        let lora = LoraConfig { rank: 4, alpha: 16.0, dropout: 0.1, ..LoraConfig::default() };
        let adapter = Arc::new(Adapter::new(&model, &lora, 5).unwrap());
        let mut trainer =
            Trainer::new(&model, &adapter, batches, options.clone(), output.path(), "llama")?
                .with_validation(validation)
                .with_group(Group::new(&**thread))?;
        let mut events = Vec::new();
        let summary = trainer.run(&mut |metric: &Metric| {
            events.extend(steady(metric));
            Ok(())
        })?;
        assert_eq!(summary.outcome, Outcome::Finished);
        Ok((events, adapter.parameters().values().to_vec1()?))
    });
    let second = ranks.remove(1)?;
    let first = ranks.remove(0)?;
    assert!(first.1 == second.1, "the ranks have other parameters");
    Ok(first)
}

/// Every weight of a model in a folder.
fn weights_in(folder: &Path) -> Vec<f32> {
    let model = load(folder, None, Placement::Device);
    Adapter::full(&model).unwrap().parameters().values().to_vec1().unwrap()
}

/// How every weight is trained.
#[derive(Clone, Copy)]
struct Whole<'a> {
    folder: &'a Path,
    batches: &'a Batcher,
    validation: Option<&'a Batcher>,
    options: &'a TrainOptions,
    /// Whether each rank has a part of it.
    is_sharded: bool,
}

impl Whole<'_> {
    /// Trains with so many ranks in a folder, which goes on from what is there, and gives the losses that the first one
    /// reports.
    fn train(self, count: usize, output: &Path) -> Vec<f64> {
        let mut ranks = as_ranks(count, |thread| {
            let placement = match self.is_sharded {
                true => Placement::Sharded(thread.clone()),
                false => Placement::Device,
            };
            let holding = Holding { quantization: None, placement };
            let model = Model::load_with(self.folder, DType::F32, &device(), holding).unwrap();
            let adapter = Arc::new(Adapter::full(&model).unwrap());
            let model = Arc::new(model.without_weights());
            let held = adapter.parameters().values().elem_count();
            match self.is_sharded {
                // But for vectors, and what fills parts up.
                true => assert!(held < adapter.parameters().len() / count + 6000, "{held}"),
                false => assert_eq!(held, adapter.parameters().len()),
            }
            let options = self.options.clone();
            let mut trainer =
                Trainer::new(&model, &adapter, self.batches, options, output, "llama")
                    .unwrap()
                    .with_group(Group::new(&**thread))
                    .unwrap();
            if let Some(validation) = self.validation {
                trainer = trainer.with_validation(validation);
            }
            // All of them are there before one writes.
            trainer.resume_newest(output).unwrap();
            Group::new(&**thread).wait("the beginning").unwrap();
            let mut losses = Vec::new();
            let summary = trainer.run(&mut |metric: &Metric| {
                match metric {
                    Metric::Train { loss, gradient_norm, .. } => {
                        losses.extend([*loss, *gradient_norm]);
                    }
                    Metric::Evaluation { loss, .. } => losses.push(*loss),
                    _ => {}
                }
                Ok(())
            });
            assert_eq!(summary.unwrap().outcome, Outcome::Finished);
            losses
        });
        ranks.remove(0)
    }

    /// What so many ranks leave.
    fn trained(self, count: usize) -> Vec<f32> {
        let output = tempfile::tempdir().unwrap();
        self.train(count, output.path());
        weights_in(output.path())
    }
}

fn most_apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn ranks_that_train_every_weight_follow_one() {
    let with_biases = |tied: bool| json!({ "tie_word_embeddings": tied, "attention_bias": true });
    // Of so many experts some read no token of a step.
    let mut mixture = with_experts();
    (mixture["num_experts"], mixture["moe_intermediate_size"]) = (json!(24), json!(32));
    mixture["head_dim"] = json!(16);
    for (tied, mut changes) in
        [with_biases(false), with_biases(true), mixture].into_iter().enumerate()
    {
        (changes["hidden_size"], changes["intermediate_size"]) = (json!(64), json!(128));
        let folder = saved(changes);
        let begun = weights_in(folder.path());
        // Of 4 rows the ranks give each other the gradients of the embedding's rows; 24 read more than it has. The last
        // batch of an epoch has one row: the other ranks have none of it.
        for (rows, accumulation) in [(4, 1), (4, 2), (24, 1)] {
            let batches = batcher(dataset(6 * rows + 1, 1), rows, false);
            let optimizer = Optimizer::Sgd(SgdOptions::default());
            let (grad_accumulation, save_every) = (accumulation, 0);
            let options = TrainOptions {
                optimizer,
                grad_accumulation,
                save_every,
                eval_every: 0,
                ..options()
            };
            let whole = Whole {
                folder: folder.path(),
                batches: &batches,
                validation: None,
                options: &options,
                is_sharded: false,
            };
            let one = whole.trained(1);
            assert!(most_apart(&one, &begun) > 1e-3);
            for count in [2, 3] {
                for (is_sharded, grad_checkpoint) in [(false, false), (true, false), (true, true)] {
                    let options = TrainOptions { grad_checkpoint, ..options.clone() };
                    let several = Whole { is_sharded, options: &options, ..whole }.trained(count);
                    let apart = most_apart(&several, &one);
                    let name = format!("{tied} {rows} {accumulation} {count} {is_sharded}");
                    assert!(apart <= 2e-6, "{name} {grad_checkpoint}: {apart}");
                }
            }
        }
    }
}

#[test]
fn ranks_with_a_part_of_every_weight_train_and_resume_as_ranks_with_all_of_them() {
    use OptimizerPlacement::{Device, Host, Sharded};
    // A width that no number of ranks divides.
    let folder = saved(json!({ "intermediate_size": 509, "tie_word_embeddings": true }));
    let (batches, validation) =
        (batcher(dataset(13, 1), 4, false), batcher(dataset(5, 2), 4, false));
    for optimizer in [
        Optimizer::AdamW(AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() }),
        Optimizer::Sgd(SgdOptions { momentum: 0.9, ..SgdOptions::default() }),
    ] {
        let of = |steps, optimizer_placement| TrainOptions {
            optimizer,
            optimizer_placement,
            clip_norm: Some(0.3),
            eval_every: 2,
            save_every: 2,
            keep_best: true,
            ..TrainOptions::new(steps, learning_rate(1e-3, steps))
        };
        // Two ranks, and then another number of them.
        let run = |is_sharded: [bool; 2], then: usize, places: [OptimizerPlacement; 2]| {
            let output = tempfile::tempdir().unwrap();
            let mut losses = Vec::new();
            for (is_sharded, count, options) in
                [(is_sharded[0], 2, of(4, places[0])), (is_sharded[1], then, of(6, places[1]))]
            {
                let whole = Whole {
                    folder: folder.path(),
                    batches: &batches,
                    validation: Some(&validation),
                    options: &options,
                    is_sharded,
                };
                losses.extend(whole.train(count, output.path()));
            }
            (losses, weights_in(output.path()))
        };
        let expected = run([false; 2], 1, [Device; 2]);
        for (is_sharded, then, places) in [
            ([true, true], 2, [Device, Sharded]),
            ([true, true], 3, [Host, Device]),
            ([true, false], 1, [Device, Device]),
            ([false, true], 2, [Sharded, Host]),
        ] {
            let found = run(is_sharded, then, places);
            let name = format!("{optimizer:?} {is_sharded:?} {then} {places:?}");
            assert_eq!(found.0.len(), expected.0.len());
            for (found, expected) in found.0.iter().zip(&expected.0) {
                assert!((found - expected).abs() <= 2e-6 * expected, "{name}: {found} {expected}");
            }
            let apart = most_apart(&found.1, &expected.1);
            assert!(apart <= 2e-5, "{name}: {apart}");
            let again = run(is_sharded, then, places);
            assert!(again == found, "{name}: other bits the second time");
        }
    }
}

#[test]
fn what_ranks_with_a_part_of_every_weight_cannot_do_says_so() {
    let folder = saved(json!({}));
    let batches = batcher(dataset(8, 1), 4, false);
    let output = tempfile::tempdir().unwrap();
    as_ranks(2, |thread| {
        let model = load(folder.path(), None, Placement::Sharded(thread.clone()));
        let adapter = Arc::new(Adapter::full(&model).unwrap());
        let options = TrainOptions {
            optimizer: Optimizer::Muon(MuonOptions::default()),
            ..TrainOptions::new(2, learning_rate(1e-3, 2))
        };
        let mut trainer = Trainer::new(&model, &adapter, &batches, options, output.path(), "llama")
            .unwrap()
            .with_group(Group::new(&**thread))
            .unwrap();
        let error = trainer.run(&mut |_: &Metric| Ok(())).unwrap_err().to_string();
        assert!(error.contains("muon makes no step of a part of every matrix"), "{error}");
        // A rank by itself would wait for the others.
        let error = evaluate(&model, Some(&adapter), &batches, None).unwrap_err().to_string();
        assert!(error.contains("in parts with 2 processes, in a group of 1"), "{error}");
        let error = Merged::new(&model, &adapter, DType::F32).unwrap_err().to_string();
        assert!(error.contains("merging while several processes have a part"), "{error}");
        let entries = adapter.parameters().entries();
        let matrix = entries.iter().position(|it| it.name.ends_with("q_proj.weight")).unwrap();
        let vector = entries.iter().position(|it| it.name == "model.norm.weight").unwrap();
        let error = adapter.parameters().view(ParameterId(matrix)).unwrap_err().to_string();
        assert!(error.contains("this process has a part of `model.layers.0"), "{error}");
        let norm = adapter.parameters().view(ParameterId(vector)).unwrap();
        assert_eq!(norm.to_vec1::<f32>().unwrap(), vec![1.0; 256]);
    });
}

fn assert_same(found: &(Vec<String>, Vec<f32>), expected: &(Vec<String>, Vec<f32>)) {
    assert_eq!(found.0, expected.0);
    assert!(found.1 == expected.1, "other parameters");
}

#[test]
fn ranks_with_a_part_of_the_base_each_train_as_ranks_with_all_of_it() {
    // The last batch of an epoch has one row, and the last of the validation data, too: the second rank has none of it.
    let (batches, validation) =
        (batcher(dataset(13, 1), 4, false), batcher(dataset(5, 2), 4, false));
    let options = TrainOptions { grad_checkpoint: true, save_every: 0, ..options() };
    let expected = trained(false, &batches, &validation, &options).unwrap();
    assert!(expected.0.len() > 12, "{:?}", expected.0);
    assert_same(&trained(true, &batches, &validation, &options).unwrap(), &expected);

    let pairs = objectives::pairs(&objectives::expected());
    let of = |count: usize| {
        let options = BatchOptions { max_seq_length: 64, batch_size: 2, ..BatchOptions::default() };
        Batcher::new(Arc::new(Dataset::from_samples(&pairs[..count]).unwrap()), options).unwrap()
    };
    let (batches, validation) = (of(3), of(3));
    for precompute_ref_log_probs in [false, true] {
        let objective = Objective::Dpo(DpoOptions::default());
        let options = TrainOptions { objective, precompute_ref_log_probs, ..options.clone() };
        let expected = trained(false, &batches, &validation, &options).unwrap();
        assert_same(&trained(true, &batches, &validation, &options).unwrap(), &expected);
    }
    let objective = Objective::Kto(KtoOptions::default());
    let options = TrainOptions { objective, ..options };
    let labelled = batches.dataset().as_ref().clone().unpaired();
    let batches = Batcher::new(Arc::new(labelled), *batches.options()).unwrap();
    let error = trained(true, &batches, &batches, &options).unwrap_err().to_string();
    assert!(error.contains("kto with sharded weights"), "{error}");
    // A rank by itself would wait for the others.
    let texts = batcher(dataset(5, 2), 4, false);
    as_ranks(2, |thread| {
        let model = load(&base(), None, Placement::Sharded(thread.clone()));
        let error = evaluate(&model, None, &texts, None).unwrap_err().to_string();
        assert!(error.contains("in parts with 2 processes, in a group of 1"), "{error}");
    });
}

/// A rank that counts what is told of the reference, and is to stop once it was told so often; and how often it says that it
/// is busy.
#[derive(Debug)]
struct Stopping {
    thread: Arc<Thread>,
    stop: Arc<AtomicBool>,
    told: AtomicU64,
    stops_at: Option<u64>,
    longest: AtomicUsize,
    busy: Arc<AtomicUsize>,
}

impl Stopping {
    fn new(thread: &Arc<Thread>, stops_at: Option<u64>) -> Self {
        Self {
            thread: thread.clone(),
            stop: Arc::default(),
            told: AtomicU64::new(0),
            stops_at,
            longest: AtomicUsize::new(0),
            busy: Arc::default(),
        }
    }
}

impl Collectives for Stopping {
    fn rank(&self) -> usize {
        Collectives::rank(&*self.thread)
    }

    fn size(&self) -> usize {
        Collectives::size(&*self.thread)
    }

    fn gather(&self, what: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        if what == "what the reference says" {
            let told = self.told.fetch_add(1, Ordering::Relaxed) + 1;
            self.longest.fetch_max(mine.len(), Ordering::Relaxed);
            if self.stops_at == Some(told) {
                self.stop.store(true, Ordering::Relaxed);
            }
        }
        self.thread.gather(what, mine)
    }

    fn tell_busy(&self) {
        self.busy.fetch_add(1, Ordering::Relaxed);
    }

    fn sum(&self, what: &'static str, buffer: &Tensor) -> Result<()> {
        Collectives::sum(&*self.thread, what, buffer)
    }

    fn spread(&self, what: &'static str, buffer: &Tensor, parts: &[Range<usize>]) -> Result<()> {
        self.thread.spread(what, buffer, parts)
    }

    fn takes(&self, device: &Device) -> bool {
        self.thread.takes(device)
    }
}

#[test]
fn others_are_told_while_rank_0_writes_a_checkpoint() {
    let batches = batcher(dataset(8, 1), 4, false);
    let output = tempfile::tempdir().unwrap();
    let busy = as_ranks(2, |thread| {
        let model = load(&base(), None, Placement::Device);
        let adapter = Arc::new(Adapter::new(&model, &LoraConfig::default(), 5).unwrap());
        let group = Stopping::new(thread, None);
        let options = TrainOptions::new(2, learning_rate(1e-3, 2));
        let mut trainer = Trainer::new(&model, &adapter, &batches, options, output.path(), "llama")
            .unwrap()
            .with_saving(|_| std::thread::sleep(Duration::from_millis(300)))
            .with_group(Group::new(&group))
            .unwrap();
        assert_eq!(trainer.run(&mut |_: &Metric| Ok(())).unwrap().outcome, Outcome::Finished);
        drop(trainer);
        group.busy.load(Ordering::Relaxed)
    });
    // Of the checkpoint after the last step, for which it waits for more than a second.
    assert!(busy[0] >= 2 && busy[1] == 0, "{busy:?}");
}

#[test]
fn others_are_told_while_rank_0_finishes_a_checkpoint_of_a_run_that_diverges() {
    let batches = batcher(dataset(8, 1), 4, false);
    let output = tempfile::tempdir().unwrap();
    let busy = as_ranks(2, |thread| {
        let model = load(&base(), None, Placement::Device);
        let adapter = Arc::new(Adapter::new(&model, &LoraConfig::default(), 5).unwrap());
        let group = Stopping::new(thread, None);
        let (busy, begun) = (group.busy.clone(), Instant::now());
        let options = TrainOptions {
            save_every: 2,
            sample_every: 3,
            skip_limit: 1,
            ..TrainOptions::new(6, learning_rate(1e-3, 6))
        };
        let mut trainer = Trainer::new(&model, &adapter, &batches, options, output.path(), "llama")
            .unwrap()
            // The checkpoint isn't complete before the other was told twice.
            .with_saving(move |_| {
                while busy.load(Ordering::Relaxed) < 2 && begun.elapsed() < Duration::from_secs(30)
                {
                    std::thread::sleep(Duration::from_millis(10));
                }
            })
            // Rank 0 breaks what it trains after step 3, while the checkpoint of step 2 is under way.
            .with_samples(Box::new(|_, adapter, _| {
                let parameters = adapter.parameters();
                let broken = parameters.view(ParameterId(0))?.affine(0.0, f64::NAN)?;
                parameters.set(ParameterId(0), &broken)?;
                Ok(Vec::new())
            }))
            .with_group(Group::new(&group))
            .unwrap();
        let error = trainer.run(&mut |_: &Metric| Ok(())).unwrap_err();
        assert!(matches!(error, Error::Diverged(_)), "{error}");
        drop(trainer);
        group.busy.load(Ordering::Relaxed)
    });
    assert!(output.path().join("checkpoints/step-00000002").is_dir());
    assert!(busy[0] >= 2 && busy[1] == 0, "{busy:?}");
}

#[test]
fn what_the_reference_says_is_kept_where_ranks_are_stopped() {
    let pairs = objectives::pairs(&objectives::expected());
    let of = |count: usize| {
        let options = BatchOptions { max_seq_length: 64, batch_size: 2, ..BatchOptions::default() };
        Batcher::new(Arc::new(Dataset::from_samples(&pairs[..count]).unwrap()), options).unwrap()
    };
    // Two batches each; of the second, the second rank has no row.
    let (batches, validation) = (of(3), of(3));
    const FILE: &str = "checkpoints/reference_logps.safetensors";
    const STEP: &str = "checkpoints/step-00000000";
    let run = |output: &Path, is_full: bool, stops_at: Option<u64>| {
        // The second has its own folder, with the checkpoint and without what is known.
        let other = tempfile::tempdir().unwrap();
        if output.join(STEP).is_dir() {
            std::fs::create_dir_all(other.path().join(STEP)).unwrap();
            for entry in std::fs::read_dir(output.join(STEP)).unwrap() {
                let entry = entry.unwrap();
                let to = other.path().join(STEP).join(entry.file_name());
                std::fs::copy(entry.path(), to).unwrap();
            }
        }
        let options = TrainOptions {
            objective: Objective::Dpo(DpoOptions::default()),
            precompute_ref_log_probs: true,
            save_every: 0,
            ..TrainOptions::new(3, learning_rate(1e-3, 3))
        };
        let mut ranks = as_ranks(2, |thread| {
            let model = Model::load(base(), DType::F32, &device()).unwrap();
            let lora = LoraConfig { rank: 4, alpha: 16.0, ..LoraConfig::default() };
            let (model, adapter) = match is_full {
                true => {
                    let full = Arc::new(Adapter::full(&model).unwrap());
                    (Arc::new(model.without_weights()), full)
                }
                false => {
                    let adapter = Arc::new(Adapter::new(&model, &lora, 5).unwrap());
                    (Arc::new(model), adapter)
                }
            };
            // One of them is asked, and all stop.
            let stops_at = stops_at.filter(|_| Collectives::rank(&**thread) == 1);
            let stopping = Stopping::new(thread, stops_at);
            let output = if Collectives::rank(&**thread) == 1 { other.path() } else { output };
            let mut trainer =
                Trainer::new(&model, &adapter, &batches, options.clone(), output, "llama")
                    .unwrap()
                    .with_validation(&validation)
                    .with_stop(stopping.stop.clone())
                    .with_group(Group::new(&stopping))
                    .unwrap();
            trainer.resume_newest(output).unwrap();
            Group::new(&stopping).wait("the beginning").unwrap();
            let summary = trainer.run(&mut |_: &Metric| Ok(())).unwrap();
            // Nobody sends more than the sums of its row of a batch.
            assert!(stopping.longest.load(Ordering::Relaxed) <= 1 + 2 * 24);
            let told = stopping.told.load(Ordering::Relaxed);
            let values = adapter.parameters().values().to_vec1::<f32>().unwrap();
            (summary.outcome, summary.step, told, values)
        });
        let (second, first) = (ranks.remove(1), ranks.remove(0));
        assert!(first == second, "the ranks came to other ends");
        first
    };
    for is_full in [false, true] {
        let whole = tempfile::tempdir().unwrap();
        let expected = run(whole.path(), is_full, None);
        // Before each batch, and after the last one.
        assert_eq!((expected.0, expected.1, expected.2), (Outcome::Finished, 3, 6));
        let parts = tempfile::tempdir().unwrap();
        // Asked before the second batch.
        let (outcome, step, told, _) = run(parts.path(), is_full, Some(1));
        assert_eq!((outcome, step, told), (Outcome::Interrupted, 0, 2), "full: {is_full}");
        assert!(parts.path().join(STEP).is_dir());
        let read = |folder: &Path| std::fs::read(folder.join(FILE)).unwrap();
        assert!(read(parts.path()) != read(whole.path()));
        // Asked before the validation data's first batch, and then not at all: what is known isn't computed again.
        let (outcome, step, told, _) = run(parts.path(), is_full, Some(1));
        assert_eq!((outcome, step, told), (Outcome::Interrupted, 0, 3), "full: {is_full}");
        let (outcome, step, told, values) = run(parts.path(), is_full, None);
        assert_eq!((outcome, step, told), (Outcome::Finished, 3, 4), "full: {is_full}");
        assert!(values == expected.3, "full: {is_full}: other parameters");
        assert!(read(parts.path()) == read(whole.path()));
    }
}

/// The parameters after a run of so many ranks in a folder, which goes on from what is there.
fn trained_in(output: &Path, ranks: usize, options: &TrainOptions) -> Vec<f32> {
    let batches = batcher(dataset(13, 1), 4, false);
    let found = as_ranks(ranks, |thread| {
        let model = load(&base(), None, Placement::Device);
        let lora = LoraConfig { rank: 4, alpha: 16.0, dropout: 0.1, ..LoraConfig::default() };
        let adapter = Arc::new(Adapter::new(&model, &lora, 5).unwrap());
        let mut trainer =
            Trainer::new(&model, &adapter, &batches, options.clone(), output, "llama")
                .unwrap()
                .with_group(Group::new(&**thread))
                .unwrap();
        // All of them are there before one writes.
        trainer.resume_newest(output).unwrap();
        Group::new(&**thread).wait("the beginning").unwrap();
        assert_eq!(trainer.run(&mut |_: &Metric| Ok(())).unwrap().outcome, Outcome::Finished);
        adapter.parameters().values().to_vec1::<f32>().unwrap()
    });
    assert!(found.iter().all(|rank| *rank == found[0]), "the ranks have other parameters");
    found[0].clone()
}

#[test]
fn ranks_with_a_part_of_the_optimiser_each_train_and_resume_as_ranks_with_all_of_it() {
    use OptimizerPlacement::{Device, Host, Sharded};
    let lora_plus = 16.0;
    for (optimizer, loraplus_lr_ratio) in [
        (Optimizer::AdamW(AdamWOptions { weight_decay: 0.1, ..AdamWOptions::default() }), 1.0),
        (Optimizer::AdamW(AdamWOptions::default()), lora_plus),
        (Optimizer::Sgd(SgdOptions { momentum: 0.9, ..SgdOptions::default() }), 1.0),
        (Optimizer::Lion(LionOptions::default()), 1.0),
    ] {
        let of = |steps, optimizer_placement| TrainOptions {
            optimizer,
            optimizer_placement,
            loraplus_lr_ratio,
            clip_norm: Some(0.3),
            eval_every: 0,
            save_every: 2,
            ..TrainOptions::new(steps, learning_rate(1e-3, steps))
        };
        // Two ranks, and then another number of them.
        let run = |first, then: usize, second| {
            let output = tempfile::tempdir().unwrap();
            let half = trained_in(output.path(), 2, &of(3, first));
            (half, trained_in(output.path(), then, &of(6, second)))
        };
        for (then, places) in [
            (2, vec![(Sharded, Sharded), (Host, Host)]),
            (3, vec![(Sharded, Host), (Host, Sharded)]),
            (1, vec![(Sharded, Host), (Host, Device)]),
        ] {
            let expected = run(Device, then, Device);
            assert_ne!(expected.0, expected.1);
            for (first, second) in places {
                let found = run(first, then, second);
                assert!(found == expected, "{optimizer:?}: 2 {first:?}, {then} {second:?}");
            }
        }
    }
}
