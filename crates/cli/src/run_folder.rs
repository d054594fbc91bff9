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
use metal_candle::train::{FolderLock, REFERENCES, latest_checkpoint};
use metal_candle::{Error, files};
use serde_yaml_ng::Mapping;
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
const NOT_REMOVED: &str = "an earlier run cannot be removed";

/// The weights of an adapter, from whichever program it is.
const ADAPTERS: [&str; 2] = [ADAPTER_WEIGHTS, MLX_WEIGHTS];

/// The files of a run, but for a whole model and the settings.
const FILES: [&str; 8] = [
    ADAPTERS[0],
    ADAPTERS[1],
    ADAPTER_CONFIG,
    CHAT_TEMPLATE,
    METRICS,
    PICTURES[0],
    PICTURES[1],
    "base_files.json",
];

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

    /// The folder of the run that is continued; `None` for a checkpoint that doesn't lie in its run's folder.
    pub fn run(&self) -> Option<PathBuf> {
        match self {
            Self::Newest(run) | Self::Again { run, .. } => Some(run.clone()),
            Self::At(checkpoint) => {
                let parent = parent_of(checkpoint).filter(|path| path.ends_with(CHECKPOINTS))?;
                let run = parent.parent().filter(|run| run.join(CONFIG).is_file())?;
                // By the name that was given, where it leads there.
                let given = checkpoint
                    .parent()
                    .and_then(Path::parent)
                    .map(|given| if given.as_os_str().is_empty() { Path::new(".") } else { given });
                Some(given.filter(|given| same_folder(given, run)).unwrap_or(run).to_path_buf())
            }
        }
    }

    /// Whether the run that is continued is that in `output`.
    fn is_of(&self, output: &Path) -> bool {
        match self {
            Self::Newest(run) | Self::Again { run, .. } => same_folder(run, output),
            Self::At(checkpoint) => parent_of(checkpoint)
                .is_some_and(|parent| same_folder(&parent, &output.join(CHECKPOINTS))),
        }
    }
}

/// The folder that a folder lies in, whatever it is called by.
fn parent_of(folder: &Path) -> Option<PathBuf> {
    Some(folder.canonicalize().ok()?.parent()?.to_path_buf())
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
    if start.resume.as_ref().is_some_and(|resume| resume.is_of(output)) {
        return Ok(());
    }
    let full = settings.fine_tune_type == FineTuneType::Full;
    if !output.join(CONFIG).is_file() {
        return check_foreign(output, full);
    }
    if start.overwrite {
        return to_remove(output).map(drop);
    }
    let model = full && output.join(MODEL_CONFIG).exists();
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

/// That a folder without the settings of a run has nothing by the names that a run's files have: it is somebody else's.
fn check_foreign(output: &Path, full: bool) -> anyhow::Result<()> {
    let model = [MODEL_CONFIG].into_iter().filter(|_| full);
    let names = FILES.into_iter().chain([EVENTS]).chain(model);
    let mut found: Vec<String> =
        names.filter(|name| output.join(name).exists()).map(String::from).collect();
    if let Some(checkpoint) = latest_checkpoint(output)? {
        let name = checkpoint.strip_prefix(output).unwrap_or(&checkpoint);
        found.push(name.display().to_string());
    }
    if found.is_empty() {
        return Ok(());
    }
    Err(usage(format!(
        "output: {} holds {}, which no run has left there (it has no {CONFIG}); a run replaces only a run's files, also with \
         --overwrite; choose another folder with --output",
        output.display(),
        found.join(", ")
    )))
}

/// That nothing which a new run reads is removed with the run that it takes the place of. Each input has its key.
pub fn check_inputs(output: &Path, inputs: &[(&str, Option<&Path>)]) -> anyhow::Result<()> {
    let Ok(folder) = output.canonicalize() else { return Ok(()) };
    if !folder.join(CONFIG).is_file() {
        return Ok(());
    }
    let mut removed = to_remove(&folder)?;
    removed.extend([CHECKPOINTS, EVENTS].map(|name| folder.join(name)));
    for (key, input) in inputs {
        let Some(path) = input.and_then(|path| path.canonicalize().ok()) else { continue };
        if removed.iter().any(|it| path.starts_with(it) || it.parent() == Some(path.as_path())) {
            return Err(usage(format!(
                "{key}: {} is of the run in the output folder, {}, whose files go when another run begins there; choose another \
                 folder with --output",
                path.display(),
                output.display()
            )));
        }
    }
    Ok(())
}

/// Removes what an earlier run left, if `overwrite` or if it ended before its first checkpoint. A folder without the
/// settings of a run holds none, and keeps everything.
///
/// Whenever this is interrupted, the earlier run is there as it was at one of its checkpoints, or can't be resumed and is
/// removed by the next one: the checkpoints go first, the newest one before those that it followed, then the result, and
/// the settings that say what it was go last.
pub fn clear(output: &Path, overwrite: bool) -> anyhow::Result<()> {
    let is_run = output.join(CONFIG).is_file();
    if !is_run || (!overwrite && !output.join(METRICS).exists()) {
        return Ok(());
    }
    let to_remove = to_remove(output)?;
    let checkpoints = output.join(CHECKPOINTS);
    // What was being replaced when an earlier run was killed comes back, and goes with the others.
    files::remove_stale_partials(&checkpoints)?;
    while let Some(newest) = latest_checkpoint(output)? {
        files::remove_folder_atomic(newest)?;
    }
    remove_file(&checkpoints.join(REFERENCES))?;
    match std::fs::remove_dir(&checkpoints) {
        // Something else is in it.
        Err(error) if error.kind() == std::io::ErrorKind::DirectoryNotEmpty => {}
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::io(&checkpoints)(error)).context(NOT_REMOVED);
        }
        _ => {}
    }
    files::remove_folder_atomic(output.join(EVENTS))?;
    to_remove.iter().try_for_each(|path| remove_file(path))
}

/// The files of the run in a folder, in the order in which they go.
fn to_remove(output: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let config = output.join(CONFIG);
    let mut paths = Vec::new();
    if trains_every_weight(&config)? {
        // What was copied beside a whole model, too, so that no template of it is taken for the next run's.
        if output.join(MODEL_CONFIG).is_file() {
            paths.extend(files::companions(output)?);
        }
        paths.extend(weights(output)?.into_iter().map(|name| output.join(name)));
        paths.push(output.join(MODEL_CONFIG));
    }
    paths.extend(FILES.map(|name| output.join(name)));
    paths.push(config);
    Ok(paths)
}

/// Whether a run's result is a whole model, by its settings; beside an adapter a model is somebody else's.
fn trains_every_weight(config: &Path) -> anyhow::Result<bool> {
    let text = std::fs::read(config).map_err(Error::io(config))?;
    let saved: Mapping = serde_yaml_ng::from_slice(&text).map_err(|error| {
        let expected = "expected the settings of a run; remove what is in its folder by hand, or choose another with --output";
        usage(format!("{}: is not a mapping ({error}); {expected}", config.display()))
    })?;
    let full = serde_yaml_ng::to_value(FineTuneType::Full)?;
    Ok(saved.get("fine_tune_type") == Some(&full))
}

fn remove_file(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(path)(error)).context(NOT_REMOVED)
        }
        _ => Ok(()),
    }
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
