//! The folder of a run: what belongs into it, who may write there, and what becomes of an earlier run.

use crate::errors::usage;
use crate::interrupt;
use crate::models::same_folder;
use crate::output::shell_word;
use crate::settings::file::File;
use crate::settings::{FineTuneType, Settings};
use anyhow::Context;
use candle_core::Device;
use metal_candle::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, MLX_WEIGHTS};
use metal_candle::model::Shards;
use metal_candle::parallel::Group;
use metal_candle::text::CHAT_TEMPLATE;
use metal_candle::train::{FolderLock, latest_checkpoint};
use metal_candle::{Error, files};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The settings of a run.
pub const CONFIG: &str = "train_config.yaml";
pub const METRICS: &str = "metrics.jsonl";
const CHECKPOINTS: &str = "checkpoints";
pub const EVENTS: &str = "tensorboard";
/// The loss curve.
pub const PICTURES: [&str; 2] = ["loss.svg", "loss.png"];
const STATE: &str = "trainer_state.json";
const MODEL_CONFIG: &str = "config.json";

/// The weights of an adapter, from whichever program it is.
const ADAPTERS: [&str; 2] = [ADAPTER_WEIGHTS, MLX_WEIGHTS];

/// Where a run goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// At this checkpoint.
    At(PathBuf),
    /// At the newest checkpoint of the run in this folder that is whole.
    Newest(PathBuf),
    /// At this checkpoint, from which the run in this folder was about to go on when it was killed.
    Again { run: PathBuf, checkpoint: PathBuf },
}

/// What happens to what is in the output folder.
#[derive(Debug, Clone, Default)]
pub struct Start {
    /// Continue a run.
    pub resume: Option<Resume>,
    /// Remove an earlier run.
    pub overwrite: bool,
    /// Nothing is to be written.
    pub dry_run: bool,
    /// Where this process computes, if that is open already; otherwise the settings say.
    pub device: Option<Device>,
    /// The processes that train together.
    pub group: Group<'static>,
    /// These processes as holders of parts of the base, where they can be that.
    pub shards: Option<Arc<dyn Shards>>,
}

impl Resume {
    /// What `--resume` asks for: `given` is a checkpoint, a run's folder, `auto`, or nothing for the run in
    /// `output`. `None` where there is nothing to resume and `auto` was given.
    pub fn find(given: Option<&Path>, output: &Path) -> anyhow::Result<Option<Self>> {
        let begun = |run: &Path| -> anyhow::Result<Option<Self>> {
            let config = run.join(CONFIG);
            let note = match config.is_file() {
                true => File::read(&config)?.resume_from,
                false => None,
            };
            let checkpoint = note.map(|path| run.join(path));
            let checkpoint = checkpoint.filter(|path| path.join(STATE).is_file());
            Ok(checkpoint.map(|checkpoint| Self::Again { run: run.to_path_buf(), checkpoint }))
        };
        let newest = |run: &Path| -> anyhow::Result<Self> {
            if let Some(again) = begun(run)? {
                return Ok(again);
            }
            match latest_checkpoint(run)? {
                Some(_) => Ok(Self::Newest(run.to_path_buf())),
                None => Err(anyhow::anyhow!(
                    "resume: {} has no checkpoint; start the run without --resume, or give --resume=auto, \
                     which starts it where there is nothing to resume",
                    run.display()
                )),
            }
        };
        match given {
            None => newest(output).map(Some),
            Some(given) if given.as_os_str() == "auto" => match begun(output)? {
                Some(again) => Ok(Some(again)),
                None => Ok(latest_checkpoint(output)?
                    .is_some()
                    .then(|| Self::Newest(output.to_path_buf()))),
            },
            Some(given) if given.join(STATE).is_file() => Ok(Some(Self::At(given.to_path_buf()))),
            Some(given) if given.is_dir() => newest(given).map(Some),
            Some(given) => {
                Err(anyhow::anyhow!("resume: there is no checkpoint {}", given.display()))
            }
        }
    }

    /// The checkpoint, or the run's folder where the newest one is looked for.
    pub fn from(&self) -> &Path {
        match self {
            Self::At(folder) | Self::Newest(folder) => folder,
            Self::Again { checkpoint, .. } => checkpoint,
        }
    }

    /// The folder of the run that is continued.
    pub fn run(&self) -> &Path {
        match self {
            Self::Newest(run) | Self::Again { run, .. } => run,
            Self::At(checkpoint) => checkpoint
                .parent()
                .and_then(Path::parent)
                .filter(|run| !run.as_os_str().is_empty())
                .unwrap_or(Path::new(".")),
        }
    }
}

/// Takes the output folder, which has to be writable and to hold no other run.
pub fn take(settings: &Settings, start: &Start) -> anyhow::Result<Arc<FolderLock>> {
    let output = &settings.output;
    let lock = hold(FolderLock::acquire(output))?;
    check(settings, start)?;
    Ok(lock)
}

/// Takes an output folder that must not exist, or be empty, and is none of `others`, which have these names.
pub fn take_new(output: &Path, others: &[(&str, &Path)]) -> anyhow::Result<Arc<FolderLock>> {
    for (name, other) in others {
        if same_folder(output, other) {
            return Err(usage(format!(
                "output: {} is the {name}'s own folder, which would be replaced; choose another",
                output.display()
            )));
        }
    }
    let lock = hold(FolderLock::acquire_beside(output))?;
    // What was killed before it had written the output left a folder of its size.
    files::remove_stale_partials_of(output)?;
    let is_free = match std::fs::read_dir(output) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => true,
        Err(_) if output.metadata().is_ok_and(|found| !found.is_dir()) => {
            return Err(usage(format!(
                "output: {} exists already; choose another, or remove it",
                output.display()
            )));
        }
        Err(error) => return Err(Error::io(output)(error).into()),
    };
    if !is_free {
        return Err(usage(format!(
            "output: {} exists and is not empty; choose another, or remove it",
            output.display()
        )));
    }
    Ok(lock)
}

/// A lock that is given free also when Ctrl-C ends the program, where what is being written beside the folder goes, too.
pub fn hold(lock: metal_candle::Result<FolderLock>) -> anyhow::Result<Arc<FolderLock>> {
    let lock = Arc::new(lock.map_err(|error| match error {
        error @ Error::Io { .. } => {
            anyhow::Error::new(error).context("the output folder cannot be written")
        }
        error => error.into(),
    })?);
    let held = Arc::downgrade(&lock);
    interrupt::tidy_up_with(move || {
        if let Some(lock) = held.upgrade() {
            files::abandon(lock.folder());
            lock.release();
        }
    });
    Ok(lock)
}

fn check(settings: &Settings, start: &Start) -> anyhow::Result<()> {
    let output = &settings.output;
    if start.resume.as_ref().is_some_and(|resume| same_folder(resume.run(), output)) {
        return Ok(());
    }
    let model = settings.fine_tune_type == FineTuneType::Full && output.join(MODEL_CONFIG).exists();
    if start.overwrite {
        if model && !output.join(CONFIG).is_file() {
            return Err(usage(format!(
                "output: {} holds a model that no run has left there (it has no {CONFIG}), which --overwrite \
                 does not remove; choose another folder with --output",
                output.display()
            )));
        }
        return Ok(());
    }
    let adapter = ADAPTERS.iter().any(|name| output.join(name).exists());
    if model || adapter || latest_checkpoint(output)?.is_some() {
        return Err(usage(format!(
            "output: {} holds a run already; continue it with --resume, choose another folder with --output, \
             or remove it with --overwrite",
            output.display()
        )));
    }
    Ok(())
}

/// Removes what an earlier run left, if `overwrite` or if it ended before its first checkpoint.
///
/// Whenever this is interrupted, the earlier run is there as a whole, or can't be resumed and is removed
/// by the next one: the checkpoints go first and at once, then the result, and the settings that say
/// what it was go last.
pub fn clear(output: &Path, overwrite: bool) -> anyhow::Result<()> {
    if !overwrite && !output.join(METRICS).exists() {
        return Ok(());
    }
    files::remove_folder_atomic(output.join(CHECKPOINTS))?;
    let mut names: Vec<String> = ADAPTERS.iter().map(ToString::to_string).collect();
    names.push(ADAPTER_CONFIG.into());
    if output.join(CONFIG).is_file() {
        // A model's files without these settings are those of somebody else.
        names.extend(weights(output)?);
        names.push(MODEL_CONFIG.into());
    }
    // What was copied beside a whole model, so that no template of it is taken for the next run's.
    let copied = match output.join(CONFIG).is_file() && output.join(MODEL_CONFIG).is_file() {
        true => files::companions(output)?,
        false => Vec::new(),
    };
    let rest = [CHAT_TEMPLATE, METRICS, PICTURES[0], PICTURES[1], "base_files.json"];
    names.extend(rest.map(String::from));
    files::remove_folder_atomic(output.join(EVENTS))?;
    names.push(CONFIG.into());
    for path in copied.into_iter().chain(names.into_iter().map(|name| output.join(name))) {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(&path)(error)).context("an earlier run cannot be removed");
            }
            _ => {}
        }
    }
    Ok(())
}

/// The files of a model's weights in a folder.
fn weights(folder: &Path) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
        let name = entry.map_err(Error::io(folder))?.file_name().to_string_lossy().into_owned();
        let is_weights = name.starts_with("model")
            && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
        if is_weights {
            names.push(name);
        }
    }
    Ok(names)
}

/// What a run has left, in the order it is read.
pub fn written(output: &Path, finished: bool) -> Vec<PathBuf> {
    let results =
        [ADAPTER_WEIGHTS, ADAPTER_CONFIG, "model.safetensors", MODEL_CONFIG, CHAT_TEMPLATE];
    let names = results
        .iter()
        .filter(|_| finished)
        .chain(&[CHECKPOINTS, METRICS, EVENTS])
        .chain(&PICTURES)
        .chain(&[CONFIG]);
    names.map(|name| output.join(name)).filter(|path| path.exists()).collect()
}

/// What to say where a result was expected in `folder` and there is a run that has not ended.
pub fn unfinished(folder: &Path) -> Option<String> {
    let newest = latest_checkpoint(folder).ok().flatten()?;
    let flag = if newest.join(ADAPTER_CONFIG).is_file() { "--adapter" } else { "--model" };
    let word = |path: &Path| shell_word(&path.display().to_string());
    Some(format!(
        "the run in it has not ended; its newest checkpoint can be used with {flag} {}, and metal-candle \
         train --resume --output {} continues it",
        word(&newest),
        word(folder)
    ))
}
