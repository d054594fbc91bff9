//! The folder of a run: what belongs into it, who may write there, and what becomes of an earlier run.

use crate::errors::usage;
use crate::interrupt;
use crate::models::same_folder;
use crate::output::shell_word;
use crate::settings::file::File;
use crate::settings::{FineTuneType, Settings, is_full, yaml};
use anyhow::Context;
use candle_core::Device;
use metal_candle::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, MLX_WEIGHTS};
use metal_candle::model::Shards;
use metal_candle::parallel::Group;
use metal_candle::text::CHAT_TEMPLATE;
use metal_candle::train::{FolderLock, REFERENCES, TensorBoard, latest_checkpoint};
use metal_candle::{Error, files};
use serde_yaml_ng::{Mapping, Value};
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
            // By the name that was given, where that says it: what a link leads to may lie elsewhere.
            Self::At(checkpoint) => {
                run_of(checkpoint).or_else(|| run_of(&checkpoint.canonicalize().ok()?))
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

/// The folder of the run that a checkpoint belongs to by its path.
fn run_of(checkpoint: &Path) -> Option<PathBuf> {
    let parent = checkpoint.parent().filter(|path| path.ends_with(CHECKPOINTS))?;
    let run = match parent.parent()? {
        run if run.as_os_str().is_empty() => Path::new("."),
        run => run,
    };
    is_run(run).then(|| run.to_path_buf())
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
    let Some(saved) = settings_in(output) else { return check_foreign(output, full) };
    // Beside an adapter a model is somebody else's.
    let of_run = is_full(&saved);
    if full && !of_run {
        refuse(output, &model_files(output)?, "the run in it has trained an adapter")?;
    }
    if start.overwrite {
        return Ok(());
    }
    let model = (full || of_run) && output.join(MODEL_CONFIG).exists();
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
/// Event files are no such files, as a run only adds one to those that are there.
fn check_foreign(output: &Path, full: bool) -> anyhow::Result<()> {
    let names = FILES.into_iter().chain([CONFIG]);
    let mut found: Vec<String> =
        names.filter(|name| output.join(name).exists()).map(String::from).collect();
    if full {
        found.extend(model_files(output)?);
    }
    if let Some(checkpoint) = latest_checkpoint(output)? {
        let name = checkpoint.strip_prefix(output).unwrap_or(&checkpoint);
        found.push(name.display().to_string());
    }
    refuse(output, &found, &format!("it has no {CONFIG} of a run"))
}

/// Refuses a folder with files that are somebody else's, if there are any, and says why they are.
fn refuse(output: &Path, found: &[String], why: &str) -> anyhow::Result<()> {
    if found.is_empty() {
        return Ok(());
    }
    Err(usage(format!(
        "output: {} holds {}, which no run has left there ({why}); a run replaces only a run's files, also with --overwrite; \
         choose another folder with --output",
        output.display(),
        found.join(", ")
    )))
}

/// That nothing which a new run reads is removed with the run that it takes the place of. Each input has its key.
pub fn check_inputs(output: &Path, inputs: &[(&str, Option<&Path>)]) -> anyhow::Result<()> {
    let Ok(folder) = output.canonicalize() else { return Ok(()) };
    let Some(saved) = settings_in(&folder) else { return Ok(()) };
    let mut removed = to_remove(&folder, &saved)?;
    // It may be a link.
    removed.extend(folder.join(CHECKPOINTS).canonicalize());
    for (key, input) in inputs {
        let Some(path) = input.and_then(|path| path.canonicalize().ok()) else { continue };
        if path == folder || removed.iter().any(|it| path.starts_with(it)) {
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
/// The checkpoints go first, the newest one before those that it followed, then the result, and the settings that say what
/// it was go last. Where this is interrupted, the run can be resumed from a checkpoint that is left, though the result
/// beside it may be of later steps; without one it can't be, and the next run removes what is left.
pub fn clear(output: &Path, overwrite: bool) -> anyhow::Result<()> {
    let Some(saved) = settings_in(output) else { return Ok(()) };
    if !overwrite && !output.join(METRICS).exists() {
        return Ok(());
    }
    let to_remove = to_remove(output, &saved)?;
    let checkpoints = output.join(CHECKPOINTS);
    // What was being replaced when an earlier run was killed comes back, and goes with the others.
    files::remove_stale_partials(&checkpoints)?;
    while let Some(newest) = latest_checkpoint(output)? {
        files::remove_folder_atomic(newest)?;
    }
    remove_file(&checkpoints.join(REFERENCES))?;
    remove_if_empty(&checkpoints)?;
    let events = output.join(EVENTS);
    TensorBoard::files_in(&events)?.iter().try_for_each(|path| remove_file(path))?;
    remove_if_empty(&events)?;
    to_remove.iter().try_for_each(|path| remove_file(path))
}

/// The files of the run with these settings in a folder, in the order in which they go.
fn to_remove(output: &Path, saved: &Mapping) -> anyhow::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    if is_full(saved) {
        // What was copied beside a whole model, too, so that no template of it is taken for the next run's.
        if output.join(MODEL_CONFIG).is_file() {
            paths.extend(files::companions(output)?);
        }
        paths.extend(model_files(output)?.into_iter().map(|name| output.join(name)));
    }
    paths.extend(FILES.map(|name| output.join(name)));
    paths.push(output.join(CONFIG));
    Ok(paths)
}

/// Whether there is a run in a folder.
fn is_run(folder: &Path) -> bool {
    settings_in(folder).is_some()
}

/// The settings of the run in a folder; `None` if there is none. Other programs have files of that name, too: a run writes
/// all of its settings, these among them.
fn settings_in(folder: &Path) -> Option<Mapping> {
    const ALWAYS: [&str; 3] = ["fine_tune_type", "save_every", "skip_limit"];
    let config = folder.join(CONFIG);
    if !config.is_file() {
        return None;
    }
    let Value::Mapping(saved) = yaml::read(&config).ok()? else { return None };
    ALWAYS.iter().all(|key| saved.contains_key(*key)).then_some(saved)
}

/// Removes a folder that nothing is left in. One that is a link or a mount stays, so that the next run has its files there,
/// too.
fn remove_if_empty(folder: &Path) -> anyhow::Result<()> {
    use std::io::ErrorKind;
    match std::fs::remove_dir(folder) {
        Err(error)
            if !matches!(
                error.kind(),
                ErrorKind::DirectoryNotEmpty
                    | ErrorKind::NotADirectory
                    | ErrorKind::NotFound
                    | ErrorKind::ResourceBusy
            ) =>
        {
            Err(Error::io(folder)(error)).context(NOT_REMOVED)
        }
        _ => Ok(()),
    }
}

fn remove_file(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(path)(error)).context(NOT_REMOVED)
        }
        _ => Ok(()),
    }
}

/// The files of a model in a folder, its weights first.
fn model_files(folder: &Path) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
        let name = entry.map_err(Error::io(folder))?.file_name().to_string_lossy().into_owned();
        let is_weights = name.starts_with("model")
            && (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"));
        if is_weights {
            names.push(name);
        }
    }
    names.sort();
    names.extend(folder.join(MODEL_CONFIG).exists().then(|| MODEL_CONFIG.to_string()));
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
