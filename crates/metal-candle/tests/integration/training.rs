//! The training loop: resuming bit for bit, also after SIGKILL, and what happens between steps.

use crate::common::device;
use candle_core::{DType, Tensor};
use metal_candle::adapter::{Adapter, LoraConfig, Targets};
use metal_candle::autograd::ParameterId;
use metal_candle::data::{BatchOptions, Batcher, Dataset, Example};
use metal_candle::model::Model;
use metal_candle::random::SplitMix64;
use metal_candle::text::ChatTemplate;
use metal_candle::train::{
    ActivationPlacement, AdafactorOptions, AdamOptions, AdamWOptions, FolderLock, JsonLines,
    LearningRate, LionOptions, Metric, MetricsSink, MuonOptions, Optimizer, Outcome, Schedule,
    ScheduleOptions, SgdOptions, Summary, TrainOptions, Trainer, Warmup, latest_checkpoint,
    metrics,
};
use metal_candle::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const STEPS: u64 = 12;

pub fn base() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/llama")
}

/// Texts over few tokens, so that there is something to learn.
pub fn dataset(count: usize, seed: u64) -> Arc<Dataset> {
    let mut random = SplitMix64::new(seed);
    let examples: Vec<_> = (0..count)
        .map(|_| {
            let length = 4 + random.below(14) as usize;
            let first = random.below(20) as u32;
            let ids: Vec<u32> = (0..length as u32).map(|index| (first + 3 * index) % 60).collect();
            Example { trainable: (0..length).map(|index| index > 1).collect(), ids }
        })
        .collect();
    Arc::new(Dataset::from_examples(&examples).unwrap())
}

pub fn batcher(dataset: Arc<Dataset>, batch_size: usize, packing: bool) -> Batcher {
    let options = BatchOptions {
        batch_size,
        max_seq_length: 32,
        packing,
        seed: 7,
        shuffle: true,
        ..BatchOptions::default()
    };
    Batcher::new(dataset, options).unwrap()
}

pub fn learning_rate(peak: f64, steps: u64) -> LearningRate {
    ScheduleOptions {
        schedule: Schedule::Cosine,
        learning_rate: peak,
        warmup: Warmup::Steps(2),
        ..ScheduleOptions::default()
    }
    .build(steps)
    .unwrap()
}

pub fn options() -> TrainOptions {
    TrainOptions {
        grad_accumulation: 2,
        report_every: 1,
        eval_every: 4,
        save_every: 3,
        keep: 2,
        seed: 11,
        ..TrainOptions::new(STEPS, learning_rate(2e-2, STEPS))
    }
}

fn model(full: bool) -> (Arc<Model>, Arc<Adapter>) {
    let model = Model::load(base(), DType::F32, &device()).unwrap();
    if full {
        let adapter = Adapter::full(&model).unwrap();
        (Arc::new(model.without_weights()), Arc::new(adapter))
    } else {
        let config = LoraConfig { rank: 4, alpha: 16.0, dropout: 0.1, ..LoraConfig::default() };
        let adapter = Adapter::new(&model, &config, 5).unwrap();
        (Arc::new(model), Arc::new(adapter))
    }
}

/// The events that must be the same in every run with the same seed: all but timings and paths.
pub fn steady(metric: &Metric) -> Option<String> {
    match metric {
        Metric::Train {
            step, epoch, loss, learning_rate, gradient_norm, trained_tokens, ..
        } => Some(format!(
            "{step} {epoch} {loss:?} {learning_rate:?} {gradient_norm:?} {trained_tokens}"
        )),
        Metric::Evaluation { step, loss, tokens, .. } => {
            Some(format!("{step} evaluation {loss:?} {tokens}"))
        }
        Metric::Skipped { step, reason } => Some(format!("{step} skipped {reason}")),
        _ => None,
    }
}

/// Those of `train`, which has validation data.
fn with_best() -> TrainOptions {
    TrainOptions { keep_best: true, ..options() }
}

/// Trains in `output`, from the newest checkpoint there if there is one.
fn train(
    output: &Path,
    full: bool,
    mut event: impl FnMut(&Metric),
    saving: impl FnMut(&Path) + Send + 'static,
    stop: Arc<AtomicBool>,
) -> (Vec<String>, Summary) {
    let (model, adapter) = model(full);
    let (batches, validation) =
        (batcher(dataset(24, 1), 3, true), batcher(dataset(9, 2), 4, false));
    let mut trainer = Trainer::new(&model, &adapter, &batches, with_best(), output, "llama")
        .unwrap()
        .with_validation(&validation)
        .with_saving(saving)
        .with_stop(stop);
    trainer.resume_newest(output).unwrap();
    std::fs::create_dir_all(output).unwrap();
    let mut log = JsonLines::resume(output.join(LOG), trainer.position()).unwrap();
    let mut events = Vec::new();
    let summary = trainer
        .run(&mut |metric: &Metric| -> Result<()> {
            log.log(metric)?;
            events.extend(steady(metric));
            event(metric);
            Ok(())
        })
        .unwrap();
    (events, summary)
}

const LOG: &str = "metrics.jsonl";

/// What the log of a run says, without timings and folders. When a checkpoint is complete, some more
/// steps may have been taken.
fn log(output: &Path) -> Vec<String> {
    let mut metrics = metrics::read(output.join(LOG)).unwrap();
    metrics.sort_by_key(|metric| {
        let ends = matches!(metric, Metric::Checkpoint { .. } | Metric::Finished { .. });
        (metric.step(), ends)
    });
    metrics
        .iter()
        .map(|metric| match metric {
            Metric::Checkpoint { step, .. } => format!("{step} checkpoint"),
            Metric::Finished { step, reason, .. } => format!("{step} finished: {reason}"),
            other => steady(other).unwrap(),
        })
        .collect()
}

fn train_quietly(output: &Path, full: bool) -> Vec<String> {
    train(output, full, |_| (), |_| (), Arc::default()).0
}

fn parameters_file(output: &Path, full: bool) -> Vec<u8> {
    let name = if full { "model.safetensors" } else { "adapter_model.safetensors" };
    std::fs::read(output.join(name)).unwrap()
}

/// Every event after the resume is the same as in the run that was never stopped.
fn assert_continues(reference: &[String], resumed: &[String], moment: &str) {
    assert!(!resumed.is_empty(), "{moment}: nothing was left to do");
    assert_eq!(&reference[reference.len() - resumed.len()..], resumed, "{moment}");
}

#[test]
fn training_lowers_the_loss_and_repeats_bit_for_bit() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut losses = Vec::new();
    let collect = |metric: &Metric| {
        if let Metric::Train { loss, .. } = metric {
            losses.push(*loss);
        }
    };
    let (events, summary) = train(first.path(), false, collect, |_| (), Arc::default());
    assert_eq!(summary.outcome, Outcome::Finished);
    assert_eq!(losses.len() as u64, STEPS);
    assert!(losses[losses.len() - 1] < 0.8 * losses[0], "{losses:?}");
    assert_eq!(events, train_quietly(second.path(), false));
    assert_eq!(parameters_file(first.path(), false), parameters_file(second.path(), false));
}

#[test]
fn an_interrupted_run_continues_bit_for_bit() {
    for full in [false, true] {
        let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let reference = train_quietly(whole.path(), full);
        for stop_at in [1, 5, 8] {
            let stop = Arc::new(AtomicBool::new(false));
            let signal = stop.clone();
            let event = move |metric: &Metric| {
                if matches!(metric, Metric::Train { step, .. } if *step == stop_at) {
                    signal.store(true, Ordering::Relaxed);
                }
            };
            let (events, summary) = train(parts.path(), full, event, |_| (), stop);
            assert_eq!(summary.outcome, Outcome::Interrupted);
            assert_eq!(summary.step, stop_at);
            let done = reference.iter().position(|event| *event == events[0]).unwrap();
            assert_eq!(&reference[done..done + events.len()], events);
        }
        let rest = train_quietly(parts.path(), full);
        assert_continues(&reference, &rest, "after three interruptions");
        assert_eq!(log(parts.path()), log(whole.path()));
        assert_eq!(parameters_file(whole.path(), full), parameters_file(parts.path(), full));
    }
}

#[cfg(unix)]
const KILL_AT: &str = "METAL_CANDLE_TEST_KILL_AT";
#[cfg(unix)]
const OUTPUT: &str = "METAL_CANDLE_TEST_OUTPUT";
#[cfg(unix)]
const FULL: &str = "METAL_CANDLE_TEST_FULL";

/// Not a test of its own: the process that `a_killed_run_continues_bit_for_bit` starts and that
/// kills itself at the moment it was told.
#[cfg(unix)]
/// The parameters after a run that is stopped after some of its steps, if at all, and continued.
fn trained_by(optimizer: Optimizer, stop_after: Option<u64>) -> (Vec<String>, Vec<f32>) {
    let output = tempfile::tempdir().unwrap();
    let batches = batcher(dataset(24, 1), 3, true);
    let options = TrainOptions {
        optimizer,
        save_every: 0,
        ..TrainOptions::new(5, learning_rate(optimizer_rate(&optimizer), 5))
    };
    let options = TrainOptions { report_every: 1, ..options };
    let mut events = Vec::new();
    for stop in [stop_after, None] {
        let (model, adapter) = model(false);
        let stopping = Arc::new(AtomicBool::new(false));
        let mut trainer =
            Trainer::new(&model, &adapter, &batches, options.clone(), output.path(), "llama")
                .unwrap()
                .with_stop(stopping.clone());
        if let Some(checkpoint) = latest_checkpoint(output.path()).unwrap() {
            trainer.resume(checkpoint).unwrap();
        }
        trainer
            .run(&mut |metric: &Metric| -> Result<()> {
                if let Metric::Train { step, .. } = metric
                    && stop == Some(*step)
                {
                    stopping.store(true, Ordering::Relaxed);
                }
                events.extend(steady(metric));
                Ok(())
            })
            .unwrap();
        if stop.is_none() {
            return (events, snapshot(&adapter));
        }
    }
    unreachable!()
}

/// One that lowers the loss of this small model.
fn optimizer_rate(optimizer: &Optimizer) -> f64 {
    match optimizer {
        Optimizer::Sgd(_) => 0.5,
        Optimizer::Lion(_) => 5e-3,
        _ => 2e-2,
    }
}

#[test]
fn every_optimizer_lowers_the_loss_and_continues_bit_for_bit() {
    let momentum = SgdOptions { momentum: 0.9, nesterov: true, ..SgdOptions::default() };
    for optimizer in [
        Optimizer::Adam(AdamOptions::default()),
        Optimizer::Sgd(SgdOptions::default()),
        Optimizer::Sgd(momentum),
        Optimizer::Lion(LionOptions::default()),
        Optimizer::AdamW8bit(AdamWOptions::default()),
        Optimizer::Adafactor(AdafactorOptions::default()),
        Optimizer::Muon(MuonOptions::default()),
    ] {
        let (events, whole) = trained_by(optimizer, None);
        let losses: Vec<f64> =
            events.iter().map(|event| event.split(' ').nth(2).unwrap().parse().unwrap()).collect();
        assert!(losses[4] < losses[0] - 0.05, "{optimizer:?}: {losses:?}");
        let (parts_events, parts) = trained_by(optimizer, Some(3));
        assert_eq!(whole, parts, "{optimizer:?}");
        assert_eq!(events, parts_events, "{optimizer:?}");
    }
}

/// A run that kills its process at a moment.
#[cfg(unix)]
fn train_and_die(moment: &str, output: &Path, full: bool) {
    let die = || {
        // SAFETY: raising a signal touches no memory of this process.
        unsafe { libc::raise(libc::SIGKILL) };
    };
    let mut files = 0;
    let file = moment.to_owned();
    train(
        output,
        full,
        |metric| {
            let name = match metric {
                Metric::Train { .. } => "step",
                Metric::Evaluation { .. } => "evaluation",
                Metric::Checkpoint { .. } => "checkpoint",
                Metric::Finished { .. } => "finished",
                _ => return,
            };
            if moment == format!("{name} {}", metric.step()) {
                die();
            }
        },
        move |_| {
            files += 1;
            if file == format!("file {files}") {
                die();
            }
        },
        Arc::default(),
    );
    panic!("the process outlived `{moment}`");
}

#[cfg(unix)]
#[test]
fn a_killed_run_continues_bit_for_bit() {
    use std::os::unix::process::ExitStatusExt;
    // The processes that are killed are this test again.
    if let (Ok(moment), Ok(output)) = (std::env::var(KILL_AT), std::env::var(OUTPUT)) {
        return train_and_die(&moment, Path::new(&output), std::env::var(FULL).is_ok());
    }
    for full in [false, true] {
        let whole = tempfile::tempdir().unwrap();
        let reference = train_quietly(whole.path(), full);
        // Steps before, between and after checkpoints, and within the first, second and third save,
        // before and after each of its files.
        let events: &[&str] = if full {
            &["step 4", "finished 12"]
        } else {
            &[
                "step 1",
                "step 4",
                "evaluation 4",
                "checkpoint 4",
                "step 7",
                "evaluation 8",
                "step 11",
                "step 12",
                "evaluation 12",
                "checkpoint 12",
                "finished 12",
            ]
        };
        let moments = events
            .iter()
            .map(ToString::to_string)
            .chain((1..=12).map(|file| format!("file {file}")));
        for moment in moments {
            let parts = tempfile::tempdir().unwrap();
            let mut child = Command::new(std::env::current_exe().unwrap());
            child
                .args(["--exact", "training::a_killed_run_continues_bit_for_bit", "--nocapture"])
                .env(KILL_AT, &moment)
                .env(OUTPUT, parts.path());
            if full {
                child.env(FULL, "1");
            }
            let output = child.output().unwrap();
            assert_eq!(output.status.signal(), Some(9), "{moment}: {output:?}");
            let rest = train_quietly(parts.path(), full);
            assert_eq!(&reference[reference.len() - rest.len()..], rest, "{moment}");
            assert_eq!(log(parts.path()), log(whole.path()), "{moment}");
            assert_eq!(
                parameters_file(whole.path(), full),
                parameters_file(parts.path(), full),
                "{moment}"
            );
            let leftovers: Vec<_> = std::fs::read_dir(parts.path().join("checkpoints"))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .filter(|name| !name.starts_with("step-"))
                .collect();
            assert!(leftovers.is_empty(), "{moment}: {leftovers:?}");
        }
    }
}

#[test]
fn training_goes_on_while_a_checkpoint_is_written() {
    for full in [false, true] {
        let (whole, beside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // The checkpoint of step 3 as it is when nothing follows it.
        let stop = Arc::new(AtomicBool::new(false));
        let signal = stop.clone();
        let stop_at_3 = move |metric: &Metric| {
            if matches!(metric, Metric::Train { step: 3, .. }) {
                signal.store(true, Ordering::Relaxed);
            }
        };
        train(whole.path(), full, stop_at_3, |_| (), stop);

        // The first checkpoint is not begun before step 4 has been taken, after which another is due.
        let (taken, is_taken) = mpsc::channel();
        let kept = tempfile::tempdir().unwrap();
        let copy_to = kept.path().to_path_buf();
        let mut calls = 0;
        let mut complete = Vec::new();
        let event = |metric: &Metric| match metric {
            Metric::Train { step: 4, .. } => taken.send(()).unwrap(),
            Metric::Checkpoint { step, path, .. } => {
                assert!(path.join("trainer_state.json").is_file(), "{}", path.display());
                complete.push(*step);
            }
            _ => {}
        };
        let saving = move |staging: &Path| {
            calls += 1;
            if calls == 1 {
                is_taken.recv_timeout(Duration::from_secs(100)).expect("training waits");
            }
            // After the last file of the first checkpoint.
            if calls == 4 {
                for entry in std::fs::read_dir(staging).unwrap() {
                    let entry = entry.unwrap();
                    std::fs::copy(entry.path(), copy_to.join(entry.file_name())).unwrap();
                }
            }
        };
        train(beside.path(), full, event, saving, Arc::default());
        assert_eq!(complete, [3, 4, 6, 8, 9, 12], "full {full}");
        assert_eq!(parameters_file(kept.path(), full), {
            let folder = whole.path().join("checkpoints/step-00000003");
            parameters_file(&folder, full)
        });
        for name in ["optimizer.safetensors", "trainer_state.json"] {
            let expected = whole.path().join("checkpoints/step-00000003").join(name);
            assert_eq!(
                std::fs::read(kept.path().join(name)).unwrap(),
                std::fs::read(expected).unwrap(),
                "{name}"
            );
        }
    }
}

#[test]
fn a_checkpoint_that_cannot_be_written_ends_the_run_with_its_error() {
    let output = tempfile::tempdir().unwrap();
    let (model, adapter) = model(false);
    let batches = batcher(dataset(24, 1), 3, true);
    let mut trainer = Trainer::new(&model, &adapter, &batches, options(), output.path(), "llama")
        .unwrap()
        // Its folder vanishes while it is written.
        .with_saving(|staging| std::fs::remove_dir_all(staging).unwrap_or(()));
    let mut last = 0;
    let error = trainer
        .run(&mut |metric: &Metric| -> Result<()> {
            last = metric.step();
            Ok(())
        })
        .unwrap_err()
        .to_string();
    assert!(error.contains("adapter_model.safetensors"), "{error}");
    assert!(last <= 6, "the error of step 3 came after step {last}");
    assert!(latest_checkpoint(output.path()).unwrap().is_none());
}

#[test]
fn a_checkpoint_of_another_run_is_refused_with_what_differs() {
    let output = tempfile::tempdir().unwrap();
    train_quietly(output.path(), false);
    let checkpoint = latest_checkpoint(output.path()).unwrap().unwrap();
    let (model, adapter) = model(false);
    let validation = batcher(dataset(9, 2), 4, false);
    let lion = Optimizer::Lion(LionOptions::default());
    let slower = Optimizer::AdamW(AdamWOptions { beta1: 0.95, ..AdamWOptions::default() });
    let same = || batcher(dataset(24, 1), 3, true);
    let cases: [(&str, Batcher, TrainOptions); 5] = [
        (
            "optimizer was adamw and is now lion",
            same(),
            TrainOptions { optimizer: lion, ..with_best() },
        ),
        (
            "optimizer.adamw.beta1 was 0.9 and is now 0.95",
            same(),
            TrainOptions { optimizer: slower, ..with_best() },
        ),
        ("batch_size", batcher(dataset(24, 1), 4, true), with_best()),
        ("the training data", batcher(dataset(24, 3), 3, true), with_best()),
        ("seed", batcher(dataset(24, 1), 3, true), TrainOptions { seed: 12, ..with_best() }),
    ];
    for (key, batches, options) in cases {
        let mut trainer = Trainer::new(&model, &adapter, &batches, options, output.path(), "llama")
            .unwrap()
            .with_validation(&validation);
        let error = trainer.resume(&checkpoint).unwrap_err().to_string();
        assert!(
            error.contains(key) || error.contains("examples") || error.contains("tokens"),
            "{key}: {error}"
        );
        assert!(error.contains("trainer_state.json"), "{error}");
    }
}

#[test]
fn a_damaged_checkpoint_is_an_error_that_names_the_file() {
    let output = tempfile::tempdir().unwrap();
    train_quietly(output.path(), false);
    let checkpoint = latest_checkpoint(output.path()).unwrap().unwrap();
    let (model, adapter) = model(false);
    let batches = batcher(dataset(24, 1), 3, true);
    let validation = batcher(dataset(9, 2), 4, false);
    for name in ["optimizer.safetensors", "adapter_model.safetensors", "trainer_state.json"] {
        let path = checkpoint.join(name);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        let mut trainer =
            Trainer::new(&model, &adapter, &batches, with_best(), output.path(), "llama")
                .unwrap()
                .with_validation(&validation);
        let error = trainer.resume(&checkpoint).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
        std::fs::write(&path, whole).unwrap();
    }
}

#[test]
fn another_adapter_or_base_is_another_run() {
    let output = tempfile::tempdir().unwrap();
    let batches = batcher(dataset(24, 1), 3, true);
    let resume = |config: &LoraConfig, change_base: bool| -> Result<()> {
        let mut model = Model::load(base(), DType::F32, &device())?;
        if change_base {
            model = Adapter::load(&model, base().join("adapter"))?.merge(model)?;
        }
        let adapter = Arc::new(Adapter::new(&model, config, 5)?);
        let model = Arc::new(model);
        let mut trainer =
            Trainer::new(&model, &adapter, &batches, options(), output.path(), "llama")?;
        match latest_checkpoint(output.path())? {
            Some(checkpoint) => trainer.resume(checkpoint).map(|_| ()),
            None => trainer.run(&mut |_: &Metric| -> Result<()> { Ok(()) }).map(|_| ()),
        }
    };
    let config = LoraConfig { rank: 4, alpha: 16.0, ..LoraConfig::default() };
    resume(&config, false).unwrap();
    resume(&config, false).unwrap();
    let error = resume(&LoraConfig { alpha: 32.0, ..config.clone() }, false).unwrap_err();
    assert!(error.to_string().contains("adapter.alpha was 16.0 and is now 32.0"), "{error}");
    let error = resume(&config, true).unwrap_err();
    assert!(error.to_string().contains("the base model, its dtype"), "{error}");
}

#[test]
fn a_new_run_does_not_begin_over_an_old_one_or_over_its_base() {
    let output = tempfile::tempdir().unwrap();
    train_quietly(output.path(), false);
    let batches = batcher(dataset(24, 1), 3, true);
    let mut quiet = |_: &Metric| -> Result<()> { Ok(()) };
    let (adapted, adapter) = model(false);
    let mut trainer =
        Trainer::new(&adapted, &adapter, &batches, options(), output.path(), "llama").unwrap();
    let error = trainer.run(&mut quiet).unwrap_err().to_string();
    assert!(error.contains("earlier run"), "{error}");

    let (full, every_weight) = model(true);
    let mut trainer = Trainer::new(&full, &every_weight, &batches, options(), base(), "llama")
        .unwrap()
        .with_companions(base());
    let error = trainer.run(&mut quiet).unwrap_err().to_string();
    assert!(error.contains("overwritten"), "{error}");
    let other = tempfile::tempdir().unwrap();
    let mut trainer =
        Trainer::new(&full, &every_weight, &batches, options(), other.path(), "llama")
            .unwrap()
            .with_companions(other.path().join("gone"));
    let mut events = 0;
    let mut count = |_: &Metric| -> Result<()> {
        events += 1;
        Ok(())
    };
    let error = trainer.run(&mut count).unwrap_err().to_string();
    assert!(error.contains("gone") && events == 0, "{error}");

    let patient = TrainOptions { patience: Some(2), ..options() };
    let empty = tempfile::tempdir().unwrap();
    let mut trainer =
        Trainer::new(&adapted, &adapter, &batches, patient, empty.path(), "llama").unwrap();
    let error = trainer.run(&mut quiet).unwrap_err().to_string();
    assert!(error.contains("patience") && error.contains("validation"), "{error}");
}

fn snapshot(adapter: &Adapter) -> Vec<f32> {
    adapter.parameters().values().to_vec1().unwrap()
}

#[test]
fn steps_with_a_nan_are_skipped_and_the_run_stops_at_the_limit() {
    let (model, adapter) = model(false);
    let store = adapter.parameters();
    let broken = store.view(ParameterId(0)).unwrap().affine(0.0, f64::NAN).unwrap();
    store.set(ParameterId(0), &broken).unwrap();
    let before = snapshot(&adapter);
    let output = tempfile::tempdir().unwrap();
    let batches = batcher(dataset(24, 1), 3, true);
    let options = TrainOptions { skip_limit: 3, ..options() };
    let mut trainer =
        Trainer::new(&model, &adapter, &batches, options, output.path(), "llama").unwrap();
    let mut skipped = Vec::new();
    let error = trainer
        .run(&mut |metric: &Metric| -> Result<()> {
            if let Metric::Skipped { step, reason } = metric {
                skipped.push((*step, reason.clone()));
            }
            Ok(())
        })
        .unwrap_err();
    assert!(matches!(error, Error::Diverged(_)), "{error}");
    assert_eq!(skipped.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(skipped[0].1.contains("NaN"), "{skipped:?}");
    let after = snapshot(&adapter);
    assert!(before.iter().zip(&after).all(|(a, b)| a.to_bits() == b.to_bits()));
}

/// The parameters after a run without evaluation or checkpoints in between.
fn trained(options: TrainOptions, batches: &Batcher, config: &LoraConfig) -> Vec<f32> {
    let model = Arc::new(Model::load(base(), DType::F32, &device()).unwrap());
    let adapter = Arc::new(Adapter::new(&model, config, 5).unwrap());
    let output = tempfile::tempdir().unwrap();
    Trainer::new(&model, &adapter, batches, options, output.path(), "llama")
        .unwrap()
        .run(&mut |_: &Metric| -> Result<()> { Ok(()) })
        .unwrap();
    snapshot(&adapter)
}

/// Those of tokens that are foreseen are small, and smaller the more tokens there are to be the mean of.
#[test]
fn gradients_in_f16_do_not_vanish_in_a_step_of_many_tokens() {
    let rows = |count, of_batch| {
        let row = Example { ids: vec![7; 32], trainable: (0..32).map(|place| place > 0).collect() };
        batcher(Arc::new(Dataset::from_examples(&vec![row; count]).unwrap()), of_batch, false)
    };
    // What is trained, from these parameters on, and the last step's loss, norm and tokens.
    let run = |dtype, from: Option<&[f32]>, options: TrainOptions, batches: &Batcher| {
        let model = Model::load(base(), dtype, &device()).unwrap();
        let adapter = Arc::new(Adapter::full(&model).unwrap());
        let model = Arc::new(model.without_weights());
        let parameters = adapter.parameters();
        for (index, entry) in parameters.entries().iter().enumerate() {
            let Some(from) = from else { break };
            let values = from[entry.offset..][..entry.shape.elem_count()].to_vec();
            let values = Tensor::from_vec(values, entry.shape.clone(), &device()).unwrap();
            parameters.set(ParameterId(index), &values).unwrap();
        }
        let output = tempfile::tempdir().unwrap();
        let mut found = (0.0, 0.0, 0);
        Trainer::new(&model, &adapter, batches, options, output.path(), "llama")
            .unwrap()
            .run(&mut |metric: &Metric| -> Result<()> {
                if let Metric::Train { loss, gradient_norm, trained_tokens, .. } = metric {
                    found = (*loss, *gradient_norm, *trained_tokens);
                }
                Ok(())
            })
            .unwrap();
        (snapshot(&adapter), found)
    };
    let options = |steps, grad_accumulation| TrainOptions {
        grad_accumulation,
        report_every: 1,
        ..TrainOptions::new(steps, learning_rate(3e-3, steps.max(2)))
    };
    let (learned, _) = run(DType::F32, None, options(400, 1), &rows(8, 8));
    let step = |dtype| run(dtype, Some(&learned), options(1, 8), &rows(8 * 64, 64)).1;
    let (expected, found) = (step(DType::F32), step(DType::F16));
    assert!(expected.2 > 10_000, "{} tokens", expected.2);
    assert!(expected.0 < 0.001, "the loss is {}", expected.0);
    let error = (found.1 / expected.1 - 1.0).abs();
    assert!(error < 0.01, "the norm is {} in f16 and {} in f32", found.1, expected.1);
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn accumulated_batches_weigh_every_token_the_same() {
    let config = LoraConfig { rank: 4, alpha: 16.0, ..LoraConfig::default() };
    // One batch of all rows, or one row at a time with very different numbers of tokens.
    let data = dataset(6, 3);
    let run = |batch_size, grad_accumulation| {
        let options = TrainOptions {
            grad_accumulation,
            optimizer: Optimizer::AdamW(AdamWOptions {
                // A large epsilon keeps AdamW from blowing up rounding in tiny gradients.
                epsilon: 1e-2,
                ..AdamWOptions::default()
            }),
            save_every: 0,
            ..TrainOptions::new(4, learning_rate(1e-2, 4))
        };
        trained(options, &batcher(data.clone(), batch_size, false), &config)
    };
    let (whole, parts) = (run(6, 1), run(1, 6));
    let difference = largest_difference(&whole, &parts);
    assert!(difference < 1e-5, "{difference}");
    assert!(largest_difference(&whole, &run(1, 1)) > 1e-3);
}

#[test]
fn gradient_checkpointing_changes_nothing_also_with_dropout() {
    let config = LoraConfig { rank: 4, alpha: 16.0, dropout: 0.3, ..LoraConfig::default() };
    let batches = batcher(dataset(24, 1), 3, true);
    let run = |grad_checkpoint, seed| {
        let options = TrainOptions { grad_checkpoint, seed, save_every: 0, ..options() };
        trained(options, &batches, &config)
    };
    let stored = run(false, 1);
    assert!(largest_difference(&stored, &run(true, 1)) < 1e-6);
    // Another seed drops other inputs.
    assert!(largest_difference(&stored, &run(false, 2)) > 1e-4);
}

#[test]
fn where_activations_wait_changes_no_bit() {
    for dropout in [0.0, 0.3] {
        let config = LoraConfig { rank: 4, alpha: 16.0, dropout, ..LoraConfig::default() };
        // Of several lengths, and more than a batch a step.
        let batches = batcher(dataset(24, 1), 3, true);
        let run = |grad_checkpoint, activation_placement| {
            let options = TrainOptions {
                grad_checkpoint,
                activation_placement,
                grad_accumulation: 2,
                save_every: 0,
                ..options()
            };
            trained(options, &batches, &config)
        };
        for grad_checkpoint in [false, true] {
            let [here, away] = [ActivationPlacement::Device, ActivationPlacement::Host]
                .map(|placement| run(grad_checkpoint, placement));
            assert_eq!(largest_difference(&here, &away), 0.0, "{dropout} {grad_checkpoint}");
        }
    }
}

#[test]
fn old_checkpoints_go_and_the_best_stays() {
    let output = tempfile::tempdir().unwrap();
    let (_, summary) = train(output.path(), false, |_| (), |_| (), Arc::default());
    let (_, best) = summary.best.unwrap();
    let mut names: Vec<String> = std::fs::read_dir(output.path().join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let mut expected = vec![best, 9, STEPS];
    expected.sort_unstable();
    expected.dedup();
    let expected: Vec<String> = expected.iter().map(|step| format!("step-{step:08}")).collect();
    // The two newest, and the best if it is none of them.
    for name in &expected {
        assert!(names.contains(name), "{names:?} lacks {name}");
    }
    assert!(names.len() <= 3, "{names:?}");
}

/// Data to validate on that contradict the data to learn from.
fn contrary() -> Batcher {
    let examples: Vec<_> = (0..6u32)
        .map(|row| {
            let ids: Vec<u32> = (0..12).map(|index| (row * 31 + index * index * 17) % 96).collect();
            Example { trainable: (0..12).map(|index| index > 0).collect(), ids }
        })
        .collect();
    batcher(Arc::new(Dataset::from_examples(&examples).unwrap()), 4, false)
}

#[test]
fn training_stops_early_when_the_validation_loss_stops_falling() {
    let (model, adapter) = model(false);
    let output = tempfile::tempdir().unwrap();
    let (batches, contrary) = (batcher(dataset(24, 1), 3, true), contrary());
    let options =
        TrainOptions { eval_every: 2, ..TrainOptions::new(400, learning_rate(3e-2, 400)) };
    let mut quiet = |_: &Metric| -> Result<()> { Ok(()) };
    let patient = |patience| {
        let options = TrainOptions { patience: Some(patience), ..options.clone() };
        let trainer = Trainer::new(&model, &adapter, &batches, options, output.path(), "llama");
        trainer.unwrap().with_validation(&contrary)
    };
    let summary = patient(2).run(&mut quiet).unwrap();
    assert_eq!(summary.outcome, Outcome::StoppedEarly);
    let mut longer = patient(4);
    longer.resume(latest_checkpoint(output.path()).unwrap().unwrap()).unwrap();
    assert_eq!(longer.run(&mut quiet).unwrap().step, summary.step + 4);
    let (_, best) = summary.best.unwrap();
    assert!(
        best + 4 <= summary.step && summary.step < 400,
        "best {best}, stopped {}",
        summary.step
    );
}

#[test]
fn options_that_cannot_work_are_refused_by_name() {
    let (model, adapter) = model(false);
    let batches = batcher(dataset(4, 1), 2, false);
    let cases: [(&str, TrainOptions); 4] = [
        ("steps", TrainOptions { steps: 0, ..options() }),
        ("grad_accumulation", TrainOptions { grad_accumulation: 0, ..options() }),
        ("clip_norm", TrainOptions { clip_norm: Some(-1.0), ..options() }),
        ("keep", TrainOptions { keep: 0, ..options() }),
    ];
    for (name, options) in cases {
        let error =
            Trainer::new(&model, &adapter, &batches, options, "nowhere", "llama").err().unwrap();
        assert!(error.to_string().contains(name), "{error}");
    }
    // The factors of an embedding have the rate itself, as full fine-tuning has.
    let targets = Targets::Names(vec!["embed_tokens".into()]);
    let config = LoraConfig { targets, ..LoraConfig::default() };
    let of_table = Arc::new(Adapter::new(&model, &config, 5).unwrap());
    let all = Arc::new(Adapter::full(&model).unwrap());
    for without_b in [&of_table, &all] {
        let options = TrainOptions { loraplus_lr_ratio: 16.0, ..options() };
        let trainer = Trainer::new(&model, without_b, &batches, options, "nowhere", "llama");
        let error = trainer.err().unwrap();
        assert!(error.to_string().contains("loraplus_lr_ratio"), "{error}");
    }
    let other = Arc::new(Model::load(base(), DType::F32, &device()).unwrap());
    let error =
        Trainer::new(&other, &adapter, &batches, options(), "nowhere", "llama").err().unwrap();
    assert!(error.to_string().contains("another model"), "{error}");
}

/// Unmounts when it goes.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// Mounts memory of that size, which takes an administrator on Linux.
fn mount(folder: &Path, options: &str) {
    let mut command = Command::new("mount");
    command.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(folder);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "needs an administrator on Linux, who may mount a small disk"]
fn a_full_disk_is_an_error_and_loses_nothing() {
    let whole = tempfile::tempdir().unwrap();
    let reference = train_quietly(whole.path(), false);
    let small = tempfile::tempdir().unwrap();
    mount(small.path(), "size=160k");
    let _mounted = Mounted(small.path().to_path_buf());
    let (model, adapter) = model(false);
    let (batches, validation) =
        (batcher(dataset(24, 1), 3, true), batcher(dataset(9, 2), 4, false));
    let error = Trainer::new(&model, &adapter, &batches, with_best(), small.path(), "llama")
        .unwrap()
        .with_validation(&validation)
        .run(&mut |_: &Metric| -> Result<()> { Ok(()) })
        .unwrap_err();
    assert!(matches!(&error, Error::Io { .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains("space") && message.contains("checkpoints"), "{message}");
    assert!(latest_checkpoint(small.path()).unwrap().is_some(), "the first checkpoint is lost");
    // With room again the run goes on as if nothing had happened.
    mount(small.path(), "remount,size=16m");
    let rest = train_quietly(small.path(), false);
    assert_continues(&reference, &rest, "after a full disk");
    assert_eq!(parameters_file(whole.path(), false), parameters_file(small.path(), false));
}

/// A run of `steps` steps in `output`, from its newest checkpoint if there is one.
fn train_for(output: &Path, steps: u64) -> Result<(Option<metal_candle::train::Resumed>, Summary)> {
    let (model, adapter) = model(false);
    let (batches, validation) =
        (batcher(dataset(24, 1), 3, true), batcher(dataset(9, 2), 4, false));
    let options = TrainOptions { steps, learning_rate: learning_rate(2e-2, steps), ..with_best() };
    let mut trainer = Trainer::new(&model, &adapter, &batches, options, output, "llama")?
        .with_validation(&validation);
    let resumed = trainer.resume_newest(output)?;
    let mut log = JsonLines::resume(output.join(LOG), trainer.position())?;
    Ok((resumed, trainer.run(&mut log)?))
}

#[test]
fn a_damaged_newest_checkpoint_gives_way_to_the_one_before() {
    let whole = tempfile::tempdir().unwrap();
    train_quietly(whole.path(), false);
    let files = [
        "optimizer.safetensors",
        "adapter_model.safetensors",
        "adapter_config.json",
        "trainer_state.json",
    ];
    for (name, cut) in files.into_iter().flat_map(|name| [(name, true), (name, false)]) {
        let output = tempfile::tempdir().unwrap();
        train_quietly(output.path(), false);
        let newest = latest_checkpoint(output.path()).unwrap().unwrap();
        let path = newest.join(name);
        let content = std::fs::read(&path).unwrap();
        if cut {
            std::fs::write(&path, &content[..content.len() / 2]).unwrap();
        } else {
            std::fs::remove_file(&path).unwrap();
        }
        let (resumed, summary) = train_for(output.path(), STEPS).unwrap();
        assert!(resumed.unwrap().step < STEPS, "{name}");
        assert_eq!(summary.outcome, Outcome::Finished);
        assert_eq!(parameters_file(whole.path(), false), parameters_file(output.path(), false));
        assert_eq!(log(output.path()), log(whole.path()), "{name}");
        // The state holds how long the evaluation took.
        let again = std::fs::read(&path).unwrap();
        assert!(name == "trainer_state.json" || again == content, "{name}");
    }
}

#[test]
fn a_run_without_a_whole_checkpoint_is_not_begun_anew_in_silence() {
    let output = tempfile::tempdir().unwrap();
    train_quietly(output.path(), false);
    for entry in std::fs::read_dir(output.path().join("checkpoints")).unwrap() {
        std::fs::write(entry.unwrap().path().join("trainer_state.json"), "{}").unwrap();
    }
    let error = train_for(output.path(), STEPS).unwrap_err().to_string();
    assert!(error.contains("no checkpoint that is whole"), "{error}");
    assert!(error.contains("trainer_state.json"), "{error}");
}

#[test]
fn a_checkpoint_of_another_version_is_no_damage() {
    let output = tempfile::tempdir().unwrap();
    train_quietly(output.path(), false);
    let path = latest_checkpoint(output.path()).unwrap().unwrap().join("trainer_state.json");
    std::fs::write(&path, "{\"version\": 1, \"step\": 3}").unwrap();
    let error = train_for(output.path(), STEPS).unwrap_err().to_string();
    assert!(error.contains("version is 1"), "{error}");
}

#[test]
fn a_finished_run_can_be_made_longer_and_follows_the_longer_schedule() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for output in [&first, &second] {
        let (resumed, _) = train_for(output.path(), 8).unwrap();
        assert_eq!(resumed, None);
        let (resumed, summary) = train_for(output.path(), STEPS).unwrap();
        let resumed = resumed.unwrap();
        assert_eq!((resumed.step, resumed.extended_from), (8, Some(8)));
        assert_eq!((summary.outcome, summary.step), (Outcome::Finished, STEPS));
    }
    // What is done twice is the same, and each later step has the rate of a run of 12 steps.
    assert_eq!(parameters_file(first.path(), false), parameters_file(second.path(), false));
    let rates: Vec<f64> = metrics::read(first.path().join(LOG))
        .unwrap()
        .iter()
        .filter_map(|metric| match metric {
            Metric::Train { learning_rate, .. } => Some(*learning_rate),
            _ => None,
        })
        .collect();
    let (short, long) = (learning_rate(2e-2, 8), learning_rate(2e-2, STEPS));
    let expected: Vec<f64> =
        (0..STEPS).map(|step| if step < 8 { short.at(step) } else { long.at(step) }).collect();
    assert_eq!(rates, expected);

    // It has ended again, and a shorter one it never was.
    let (resumed, summary) = train_for(first.path(), STEPS).unwrap();
    assert_eq!((resumed.unwrap().extended_from, summary.step), (None, STEPS));
    assert!(summary.evaluation.is_some());
    let error = train_for(first.path(), 10).unwrap_err().to_string();
    assert!(error.contains("total_steps was 12") && error.contains("not shorter"), "{error}");
}

#[test]
fn one_run_at_a_time_works_in_a_folder() {
    let output = tempfile::tempdir().unwrap();
    let other = FolderLock::acquire(output.path()).unwrap();
    let error = train_for(output.path(), STEPS).unwrap_err().to_string();
    assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    assert!(!output.path().join("checkpoints").exists());
    drop(other);
    train_for(output.path(), 3).unwrap();
}

#[test]
fn an_evaluation_is_given_up_when_the_run_is_to_stop() {
    let whole = tempfile::tempdir().unwrap();
    train_quietly(whole.path(), false);
    for step in [4, STEPS] {
        let output = tempfile::tempdir().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let signal = stop.clone();
        let event = move |metric: &Metric| {
            if matches!(metric, Metric::Train { step: at, .. } if *at == step) {
                signal.store(true, Ordering::Relaxed);
            }
        };
        let (events, summary) = train(output.path(), false, event, |_| (), stop);
        assert_eq!((summary.outcome, summary.step), (Outcome::Interrupted, step));
        assert!(!events.last().unwrap().contains("evaluation"), "{events:?}");
        // It is made up for, and counts for what is best.
        train_quietly(output.path(), false);
        assert_eq!(log(output.path()), log(whole.path()), "stopped at {step}");
        assert_eq!(parameters_file(output.path(), false), parameters_file(whole.path(), false));
    }
}

#[test]
fn a_changed_byte_anywhere_in_the_base_is_another_base() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(base().join(name), folder.path().join(name)).unwrap();
    }
    let output = tempfile::tempdir().unwrap();
    let batches = batcher(dataset(24, 1), 3, true);
    let run = |steps| -> Result<()> {
        let model = Arc::new(Model::load(folder.path(), DType::F32, &device())?);
        let config = LoraConfig { rank: 4, alpha: 16.0, ..LoraConfig::default() };
        let adapter = Arc::new(Adapter::new(&model, &config, 5)?);
        let options = TrainOptions { steps, ..options() };
        let mut trainer =
            Trainer::new(&model, &adapter, &batches, options, output.path(), "llama")?;
        trainer.resume_newest(output.path())?;
        trainer.run(&mut |_: &Metric| -> Result<()> { Ok(()) }).map(|_| ())
    };
    run(2).unwrap();
    run(3).unwrap();
    // The lowest bit of the last value of a matrix, which no sample of its first ones shows.
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let place = &tensors["model.embed_tokens.weight"]["data_offsets"];
    let [start, end] = [0, 1].map(|index| place[index].as_u64().unwrap() as usize);
    assert!(end - start > 4096);
    bytes[8 + header + end - 4] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let error = run(4).unwrap_err().to_string();
    assert!(error.contains("base_files.model.safetensors was"), "{error}");
}

#[test]
fn another_chat_template_is_another_run() {
    let output = tempfile::tempdir().unwrap();
    let ((model, adapter), batches) = (model(false), batcher(dataset(24, 1), 3, true));
    let trainer = |source: &str| {
        let template = ChatTemplate::new(source, vec![], vec![], vec![]).unwrap();
        let options = TrainOptions { steps: 2, ..options() };
        Trainer::new(&model, &adapter, &batches, options, output.path(), "llama")
            .unwrap()
            .with_chat_template(&template)
    };
    trainer("{{ a }}").run(&mut |_: &Metric| -> Result<()> { Ok(()) }).unwrap();
    trainer("{{ a }}").resume_newest(output.path()).unwrap();
    let error = trainer("{{ b }}").resume_newest(output.path()).unwrap_err().to_string();
    assert!(error.contains("the chat template is not"), "{error}");
}

#[test]
fn a_run_whose_last_steps_are_skipped_says_so() {
    let run = |from: u64| {
        let (model, adapter) = model(false);
        let batches = batcher(dataset(24, 1), 3, true);
        let options = TrainOptions { steps: 4, eval_every: 0, ..options() };
        let output = tempfile::tempdir().unwrap();
        let mut reasons = Vec::new();
        let result = Trainer::new(&model, &adapter, &batches, options, output.path(), "llama")
            .unwrap()
            .run(&mut |metric: &Metric| -> Result<()> {
                // From here on every loss is NaN.
                let store = adapter.parameters();
                if matches!(metric, Metric::Train { step, .. } if *step == from) {
                    let broken = store.view(ParameterId(0))?.affine(0.0, f64::NAN)?;
                    store.set(ParameterId(0), &broken)?;
                }
                if let Metric::Finished { reason, .. } = metric {
                    reasons.push(reason.clone());
                }
                Ok(())
            });
        (result, reasons)
    };
    let (result, reasons) = run(2);
    let summary = result.unwrap();
    assert_eq!((summary.outcome, summary.skipped_in_a_row), (Outcome::LastStepsSkipped, 2));
    assert!(reasons[0].contains("the last 2 of them skipped"), "{reasons:?}");
    let (result, _) = run(9);
    assert_eq!(result.unwrap().outcome, Outcome::Finished);
}

#[test]
fn a_run_that_learned_nothing_has_failed() {
    let (model, adapter) = model(false);
    let store = adapter.parameters();
    let broken = store.view(ParameterId(0)).unwrap().affine(0.0, f64::NAN).unwrap();
    store.set(ParameterId(0), &broken).unwrap();
    let output = tempfile::tempdir().unwrap();
    let batches = batcher(dataset(24, 1), 3, true);
    let options = TrainOptions { steps: 3, ..options() };
    let error = Trainer::new(&model, &adapter, &batches, options, output.path(), "llama")
        .unwrap()
        .run(&mut |_: &Metric| -> Result<()> { Ok(()) })
        .unwrap_err();
    assert!(
        matches!(&error, Error::Diverged(message) if message.contains("all 3 steps")),
        "{error}"
    );
    assert!(!output.path().join("adapter_model.safetensors").exists());
}

/// What happens between the steps of a run over epochs of 3 steps, which stops while it samples after the step
/// `stopped_at`; and its parameters.
fn between_steps(output: &Path, stopped_at: Option<u64>) -> (Vec<String>, Vec<f32>) {
    let (model, adapter) = model(false);
    let (batches, validation) =
        (batcher(dataset(24, 1), 3, false), batcher(dataset(9, 2), 4, false));
    let options = TrainOptions {
        grad_accumulation: 3,
        eval_every: 0,
        save_every: 2,
        epoch_ends: true,
        keep: 100,
        ..options()
    };
    let stop = Arc::new(AtomicBool::new(false));
    let mut shown = 0;
    let mut trainer = Trainer::new(&model, &adapter, &batches, options, output, "llama")
        .unwrap()
        .with_validation(&validation)
        .with_stop(stop.clone())
        .with_samples(Box::new(|_, _, seed| {
            shown += 3;
            stop.store(stopped_at == Some(shown), Ordering::Relaxed);
            Ok(vec![("prompt".into(), format!("text {seed}"))])
        }));
    trainer.resume_newest(output).unwrap();
    let mut events = Vec::new();
    trainer
        .run(&mut |metric: &Metric| -> Result<()> {
            let step = metric.step();
            events.extend(match metric {
                Metric::Evaluation { loss, .. } => Some(format!("{step} evaluation {loss:?}")),
                Metric::Sample { text, .. } => Some(format!("{step} {text}")),
                Metric::Checkpoint { .. } => Some(format!("{step} checkpoint")),
                _ => None,
            });
            Ok(())
        })
        .unwrap();
    drop(trainer);
    (events, snapshot(&adapter))
}

#[test]
fn epochs_end_with_an_evaluation_samples_and_a_checkpoint() {
    let whole = tempfile::tempdir().unwrap();
    let (events, parameters) = between_steps(whole.path(), None);
    let steps_of = |word: &str| -> Vec<u64> {
        let of = events.iter().filter(|event| event.contains(word));
        of.map(|event| event.split(' ').next().unwrap().parse().unwrap()).collect()
    };
    assert_eq!(steps_of("evaluation"), [3, 6, 9, 12]);
    assert_eq!(steps_of("text"), [3, 6, 9, 12]);
    assert_eq!(steps_of("checkpoint"), [2, 3, 4, 6, 8, 9, 10, 12]);

    let parts = tempfile::tempdir().unwrap();
    let (first, _) = between_steps(parts.path(), Some(6));
    let is_at_six = |event: &&String| event.starts_with("6 ");
    let at_six: Vec<_> = first.iter().filter(is_at_six).map(|event| &event[..4]).collect();
    assert_eq!(at_six, ["6 ev", "6 ch"], "samples under way are left out");
    let (second, of_both) = between_steps(parts.path(), None);
    assert!(second[0].starts_with("6 text"), "{second:?}");
    let is_text = |event: &&String| event.contains("text");
    let texts = |events: &[String]| events.iter().filter(is_text).cloned().collect::<Vec<_>>();
    assert_eq!([texts(&first), texts(&second)].concat(), texts(&events));
    assert_eq!(of_both, parameters);
}

/// Changes the lowest bit of a byte in the middle of a file.
fn flip_a_bit(path: &Path) {
    let mut content = std::fs::read(path).unwrap();
    let middle = content.len() / 2;
    content[middle] ^= 1;
    std::fs::write(path, content).unwrap();
}

#[test]
fn a_bit_that_flips_in_a_checkpoint_is_noticed() {
    for (name, full) in [
        ("adapter_model.safetensors", false),
        ("optimizer.safetensors", false),
        ("model.safetensors", true),
    ] {
        let output = tempfile::tempdir().unwrap();
        let reference = train_quietly(output.path(), full);
        let result = parameters_file(output.path(), full);
        let path = latest_checkpoint(output.path()).unwrap().unwrap().join(name);
        flip_a_bit(&path);
        let (model, adapter) = model(full);
        let (batches, validation) =
            (batcher(dataset(24, 1), 3, true), batcher(dataset(9, 2), 4, false));
        let mut trainer =
            Trainer::new(&model, &adapter, &batches, with_best(), output.path(), "llama")
                .unwrap()
                .with_validation(&validation);
        let error = trainer.resume(path.parent().unwrap()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("is not what was written"), "{error}");
        assert_continues(&reference, &train_quietly(output.path(), full), name);
        assert_eq!(parameters_file(output.path(), full), result, "{name}");
    }
}

#[test]
fn a_checkpoint_without_hashes_of_version_5_is_resumed() {
    let output = tempfile::tempdir().unwrap();
    train_quietly(output.path(), false);
    let newest = latest_checkpoint(output.path()).unwrap().unwrap();
    let path = newest.join("trainer_state.json");
    let mut state: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(state["files"].as_object().unwrap().len(), 2, "{state}");
    state.as_object_mut().unwrap().remove("files");
    state["version"] = 5.into();
    std::fs::write(&path, state.to_string()).unwrap();
    let (resumed, _) = train_for(output.path(), STEPS).unwrap();
    assert_eq!(resumed.unwrap().checkpoint, newest);
}

/// A run in `output` whose evaluations get worse from early on, from the newest checkpoint of the run in `from`.
fn past_its_best(
    output: &Path,
    from: Option<&Path>,
    mut event: impl FnMut(&Metric),
    stop_after: u64,
) -> Summary {
    let (model, adapter) = model(false);
    let (batches, validation) = (batcher(dataset(24, 1), 3, true), contrary());
    let options =
        TrainOptions { eval_every: 2, learning_rate: learning_rate(6e-2, STEPS), ..with_best() };
    let stop = Arc::new(AtomicBool::new(false));
    let mut trainer = Trainer::new(&model, &adapter, &batches, options, output, "llama")
        .unwrap()
        .with_validation(&validation)
        .with_stop(stop.clone());
    if let Some(run) = from {
        trainer.resume_newest(run).unwrap().unwrap();
    }
    trainer
        .run(&mut |metric: &Metric| -> Result<()> {
            if matches!(metric, Metric::Train { step, .. } if *step == stop_after) {
                stop.store(true, Ordering::Relaxed);
            }
            event(metric);
            Ok(())
        })
        .unwrap()
}

/// The step of the best evaluation of these runs, and their result.
fn best_of_a_whole_run() -> (u64, Vec<u8>) {
    let whole = tempfile::tempdir().unwrap();
    let summary = past_its_best(whole.path(), None, |_| (), u64::MAX);
    let (_, best) = summary.best.unwrap();
    assert!(best < 9, "{best}");
    (best, parameters_file(whole.path(), false))
}

fn checkpoint_of(output: &Path, step: u64) -> PathBuf {
    output.join(format!("checkpoints/step-{step:08}"))
}

#[test]
fn the_best_checkpoint_goes_with_a_run_into_another_folder() {
    let (best, expected) = best_of_a_whole_run();
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    past_its_best(first.path(), None, |_| (), 9);
    past_its_best(second.path(), Some(first.path()), |_| (), 10);
    assert!(checkpoint_of(second.path(), best).is_dir());
    // From here on the first folder isn't needed.
    drop(first);
    past_its_best(second.path(), Some(second.path()), |_| (), u64::MAX);
    assert_eq!(parameters_file(second.path(), false), expected);
}

#[test]
fn a_run_goes_on_without_its_best_checkpoint() {
    let (best, _) = best_of_a_whole_run();
    let damages: [fn(&Path); 2] = [
        |checkpoint| std::fs::remove_dir_all(checkpoint).unwrap(),
        |checkpoint| flip_a_bit(&checkpoint.join("adapter_model.safetensors")),
    ];
    for damage in damages {
        let output = tempfile::tempdir().unwrap();
        past_its_best(output.path(), None, |_| (), 9);
        damage(&checkpoint_of(output.path(), best));
        let summary = past_its_best(output.path(), Some(output.path()), |_| (), u64::MAX);
        assert_eq!(summary.outcome, Outcome::Finished);
        let (_, best) = summary.best.unwrap();
        assert!(best > 9, "{best}");
        assert_eq!(
            parameters_file(output.path(), false),
            parameters_file(&checkpoint_of(output.path(), best), false)
        );
    }
}

#[test]
fn a_best_checkpoint_that_is_lost_at_the_end_leaves_the_last_parameters() {
    let (best, _) = best_of_a_whole_run();
    let output = tempfile::tempdir().unwrap();
    let lose = |metric: &Metric| {
        if matches!(metric, Metric::Evaluation { step: STEPS, .. }) {
            std::fs::remove_dir_all(checkpoint_of(output.path(), best)).unwrap();
        }
    };
    let summary = past_its_best(output.path(), None, lose, u64::MAX);
    assert_eq!(summary.outcome, Outcome::Finished);
    assert_eq!(
        parameters_file(output.path(), false),
        parameters_file(&checkpoint_of(output.path(), STEPS), false)
    );
}

/// A log that counts how often its files are asked for.
struct Flushed(std::cell::Cell<usize>);

impl MetricsSink for Flushed {
    fn log(&mut self, _: &Metric) -> Result<()> {
        Ok(())
    }

    fn files(&self) -> Result<Vec<(PathBuf, std::fs::File)>> {
        self.0.set(self.0.get() + 1);
        Ok(Vec::new())
    }
}

#[test]
fn logs_are_flushed_with_every_checkpoint() {
    let output = tempfile::tempdir().unwrap();
    let ((model, adapter), batches) = (model(false), batcher(dataset(24, 1), 3, true));
    let mut log = Flushed(std::cell::Cell::new(0));
    Trainer::new(&model, &adapter, &batches, options(), output.path(), "llama")
        .unwrap()
        .run(&mut log)
        .unwrap();
    // After steps 3, 6, 9 and 12.
    assert_eq!(log.0.get(), 4);
}
