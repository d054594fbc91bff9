//! Adapters by name: those of a watched folder, those that were loaded by request, and fine-tuned models. They are read
//! when they are first asked for, and the least recently used go when there are too many.

use crate::app::{App, Shared};
use crate::error::{ApiError, Result};
use crate::hub::Download;
use crate::replicas::{Place, Replica, Replicas};
use metal_candle::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter, MLX_WEIGHTS, read_config};
use metal_candle::files;
use metal_candle::text::{Tokenizer, chat_template_in};
use std::collections::BTreeMap;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Adapters that were loaded by request, at most.
const MOST_NAMED: usize = 100_000;

/// The model that a request names.
#[derive(Clone)]
pub struct Chosen {
    /// Its name, as it was asked for.
    pub name: String,
    /// Where its texts are written.
    pub place: Arc<Place>,
    /// What the base is read with there.
    pub adapter: Option<Arc<Adapter>>,
    /// The base's tokenizer with the adapter's chat template, if it has one.
    pub tokenizer: Arc<Tokenizer>,
}

/// An adapter that can be asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Where it lies.
    pub folder: PathBuf,
    /// Seconds since 1970.
    pub created: i64,
}

/// The adapters that are known, and those of them that are loaded.
#[derive(Default)]
pub struct Adapters {
    /// Those that were loaded by request.
    named: Mutex<BTreeMap<String, PathBuf>>,
    loaded: Mutex<Vec<Loaded>>,
    /// Held while an adapter is read, so that none is read twice at once.
    reading: Mutex<()>,
    /// Held in its place for an adapter that takes long, so that the others needn't wait for it.
    searching: Mutex<()>,
    /// Those that are brought from the hub at the moment.
    pub(crate) downloads: Mutex<BTreeMap<String, Download>>,
}

/// An adapter in memory, and its tokenizer if it has a chat template of its own.
type Ready = (Arc<Adapter>, Option<Arc<Tokenizer>>);

struct Loaded {
    /// The replica that it is for.
    replica: usize,
    folder: PathBuf,
    version: Version,
    adapter: Arc<Adapter>,
    tokenizer: Option<Arc<Tokenizer>>,
}

/// Which replica a request goes to.
type ChoosePlace = fn(&Replicas) -> Arc<Place>;

/// What tells an adapter's files from those that were there before: the length of each and when it was changed.
type Version = Vec<(PathBuf, u64, Option<SystemTime>)>;

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl App {
    /// The model of this name, to write texts with.
    ///
    /// # Errors
    /// A 404 when there is none, and what is wrong with an adapter's files.
    pub async fn choose(self: &Shared, name: &str) -> Result<Chosen> {
        self.choose_at(Replicas::place, name).await
    }

    /// The model of this name for what is computed with [`App::model`], as an adapter is for one replica's model alone.
    ///
    /// # Errors
    /// As [`Self::choose`].
    pub async fn choose_on_first(self: &Shared, name: &str) -> Result<Chosen> {
        self.choose_at(Replicas::place_on_first, name).await
    }

    async fn choose_at(self: &Shared, place: ChoosePlace, name: &str) -> Result<Chosen> {
        if self.is_base(name) {
            let (name, tokenizer) = (name.to_string(), self.tokenizer.clone());
            return Ok(Chosen { name, place: place(&self.replicas), adapter: None, tokenizer });
        }
        match self.known(place, name).await? {
            Some(chosen) => Ok(chosen),
            None => {
                self.fetch_from_hub(name).await?;
                // Unless somebody has unloaded it meanwhile.
                self.known(place, name).await?.ok_or_else(|| ApiError::no_model(name))
            }
        }
    }

    /// The adapter of this name, if there is one on this machine.
    async fn known(self: &Shared, place: ChoosePlace, name: &str) -> Result<Option<Chosen>> {
        let name = name.to_string();
        self.blocking(move |app| {
            let Some(folder) = app.folder_of(&name)? else { return Ok(None) };
            let place = place(&app.replicas);
            let loaded = app.loaded(&place.replica, &folder);
            let (adapter, tokenizer) =
                loaded.map_err(|error| refusal(app, &folder, &error).about("model"))?;
            let tokenizer = tokenizer.unwrap_or_else(|| app.tokenizer.clone());
            Ok(Some(Chosen { name, place, adapter: Some(adapter), tokenizer }))
        })
        .await
    }

    /// The adapter of a folder, read now if it wasn't.
    ///
    /// # Errors
    /// What is wrong with its files.
    pub(crate) fn read_adapter(&self, folder: &Path) -> metal_candle::Result<()> {
        self.loaded(&self.replicas.place().replica, folder).map(drop)
    }

    /// Whether a name is the base's.
    pub fn is_base(&self, name: &str) -> bool {
        self.options.model_name == name || self.options.aliases.iter().any(|alias| alias == name)
    }

    /// Warns of adapters in the watched folder that nobody can ask for, as the base has their names.
    pub fn warn_of_hidden(&self) {
        let names = std::iter::once(&self.options.model_name).chain(&self.options.aliases);
        for name in names.filter(|name| is_plain(name)) {
            for folder in self.options.adapters.iter().map(|watched| watched.join(name)) {
                if folder.join(ADAPTER_CONFIG).is_file() {
                    let folder = folder.display();
                    tracing::warn!(
                        "{folder} can't be asked for, as {name} is the base's name; rename it"
                    );
                }
            }
        }
    }

    /// Where the adapter of a name lies.
    ///
    /// # Errors
    /// When the database fails.
    pub fn folder_of(&self, name: &str) -> Result<Option<PathBuf>> {
        if let Some(folder) = locked(&self.adapters.named).get(name) {
            return Ok(Some(folder.clone()));
        }
        if let Some(watched) = &self.options.adapters
            && is_plain(name)
            && watched.join(name).join(ADAPTER_CONFIG).is_file()
        {
            return Ok(Some(watched.join(name)));
        }
        Ok(self.store.tuned_by_name(name)?.map(|tuned| tuned.folder))
    }

    /// Every adapter that can be asked for, by name.
    ///
    /// # Errors
    /// When the database fails.
    pub fn listed(&self) -> Result<Vec<Listed>> {
        let mut listed: Vec<Listed> = locked(&self.adapters.named)
            .iter()
            .map(|(name, folder)| Listed {
                name: name.clone(),
                folder: folder.clone(),
                created: created(folder),
            })
            .collect();
        let watched = self.options.adapters.iter().filter_map(|folder| folder.read_dir().ok());
        for entry in watched.flatten().flatten() {
            let folder = entry.path();
            if let Ok(name) = entry.file_name().into_string()
                && !self.is_base(&name)
                && folder.join(ADAPTER_CONFIG).is_file()
            {
                let created = created(&folder);
                listed.push(Listed { name, folder, created });
            }
        }
        listed.extend(self.store.tuned()?.into_iter().map(|tuned| Listed {
            name: tuned.name,
            folder: tuned.folder,
            created: tuned.created,
        }));
        listed.sort_by(|a, b| a.name.cmp(&b.name));
        listed.dedup_by(|a, b| a.name == b.name);
        Ok(listed)
    }

    /// Gives the adapter of a folder a name, once it has been read; now, where it takes the place of another.
    ///
    /// # Errors
    /// When the name is taken or the folder is no adapter of this base.
    pub fn name_adapter(&self, name: &str, folder: &Path, replace: bool) -> Result<()> {
        let taken = |what: &str| {
            let message = format!("{name}: {what}; unload it, or choose another name");
            ApiError::invalid(message).about("lora_name")
        };
        if self.is_base(name) {
            return Err(taken("is the base model's name"));
        }
        if !replace && self.folder_of(name)?.is_some() {
            return Err(taken("is loaded already"));
        }
        if !folder.join(ADAPTER_CONFIG).is_file() {
            let message = format!("lora_path: there is no {ADAPTER_CONFIG} in that folder");
            return Err(ApiError::invalid(message).about("lora_path"));
        }
        if replace {
            self.forget(folder);
        }
        self.read_adapter(folder)
            .map_err(|error| refusal(self, folder, &error).about("lora_path"))?;
        self.keep_name(name, folder)
    }

    /// Has the adapter of a folder read again when it is asked for next.
    fn forget(&self, folder: &Path) {
        locked(&self.adapters.loaded).retain(|loaded| loaded.folder != *folder);
    }

    /// Gives a folder a name.
    ///
    /// # Errors
    /// When there are too many.
    pub(crate) fn keep_name(&self, name: &str, folder: &Path) -> Result<()> {
        let mut named = locked(&self.adapters.named);
        if named.len() >= MOST_NAMED {
            return Err(ApiError::invalid(format!("{MOST_NAMED} adapters are loaded already")));
        }
        named.insert(name.into(), folder.into());
        Ok(())
    }

    /// Forgets a name that was given by request; says whether there was one.
    pub fn unname_adapter(&self, name: &str) -> bool {
        let folder = locked(&self.adapters.named).remove(name);
        if let Some(folder) = &folder {
            self.forget(folder);
        }
        folder.is_some()
    }

    /// The adapter of a folder for a replica, and a tokenizer with its chat template if it has one of its own.
    fn loaded(&self, replica: &Replica, folder: &Path) -> metal_candle::Result<Ready> {
        let version = version(folder);
        if let Some(found) = self.adapters.find(replica.index, folder, &version) {
            return Ok(found);
        }
        let _reading = locked(self.adapters.turn_of(folder));
        if let Some(found) = self.adapters.find(replica.index, folder, &version) {
            return Ok(found);
        }
        read_through(&version);
        let turn = || replica.turns.hold();
        let adapter = Arc::new(Adapter::load_in_turns(&replica.model, folder, turn)?);
        let tokenizer = match chat_template_in(folder)? {
            Some(_) => {
                let mut tokenizer = Tokenizer::load(&self.folder)?;
                tokenizer.take_chat_template(folder)?;
                Some(Arc::new(tokenizer))
            }
            None => None,
        };
        let mut loaded = locked(&self.adapters.loaded);
        let is_here = |other: &Loaded| other.replica == replica.index;
        loaded.retain(|other| !is_here(other) || other.folder != folder);
        let here = loaded.iter().filter(|other| is_here(other)).count();
        if here >= self.options.max_adapters.max(1)
            && let Some(oldest) = loaded.iter().position(is_here)
        {
            loaded.remove(oldest);
        }
        loaded.push(Loaded {
            replica: replica.index,
            folder: folder.to_path_buf(),
            version,
            adapter: adapter.clone(),
            tokenizer: tokenizer.clone(),
        });
        Ok((adapter, tokenizer))
    }
}

impl Adapters {
    /// What is held while the adapter of a folder is read.
    fn turn_of(&self, folder: &Path) -> &Mutex<()> {
        // What is wrong with the configuration is told when the adapter is read.
        match read_config(folder) {
            Ok((config, _)) if config.start.takes_from_weight() => &self.searching,
            _ => &self.reading,
        }
    }

    /// One that is loaded and whose files are the same, which becomes the most recently used.
    fn find(&self, replica: usize, folder: &Path, version: &Version) -> Option<Ready> {
        let mut loaded = locked(&self.loaded);
        let is_it =
            |it: &Loaded| it.replica == replica && it.folder == folder && it.version == *version;
        let place = loaded.iter().position(is_it)?;
        let found = loaded.remove(place);
        let result = (found.adapter.clone(), found.tokenizer.clone());
        loaded.push(found);
        Some(result)
    }

    /// How many are loaded.
    pub fn count(&self) -> usize {
        locked(&self.loaded).len()
    }
}

/// Whether a name is one of a folder in another, and leads nowhere else.
fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!(parts.next(), Some(Component::Normal(part)) if part == name) && parts.next().is_none()
}

/// What is said of an adapter that can't be read: without the server's paths, which its log has.
fn refusal(app: &App, folder: &Path, error: &metal_candle::Error) -> ApiError {
    tracing::error!("{}: {error}", folder.display());
    let message = error.to_string().replace(&folder.join("").display().to_string(), "");
    let message = format!("the adapter cannot be used: {}", app.store.without_paths(&message));
    match error {
        metal_candle::Error::File { .. }
        | metal_candle::Error::Option { .. }
        | metal_candle::Error::Unsupported(_) => ApiError::invalid(message),
        _ => ApiError::internal(message),
    }
}

/// Of the files that an adapter is read from.
fn version(folder: &Path) -> Version {
    // What can't be looked at is told when it is read.
    let mut paths = files::companions(folder).unwrap_or_default();
    paths.extend([ADAPTER_CONFIG, MLX_WEIGHTS, ADAPTER_WEIGHTS].map(|name| folder.join(name)));
    let of = |path: PathBuf| {
        let found = path.metadata().ok()?;
        Some((path, found.len(), found.modified().ok()))
    };
    paths.into_iter().filter_map(of).collect()
}

/// Has the system bring files into memory, so that nobody waits for the disk while an adapter has the device.
fn read_through(version: &Version) {
    for (path, ..) in version {
        // What can't be read is told when it is loaded.
        if let Ok((mut file, _)) = files::open_regular(path) {
            let _ = io::copy(&mut file, &mut io::sink());
        }
    }
}

fn created(folder: &Path) -> i64 {
    let weights = [ADAPTER_WEIGHTS, MLX_WEIGHTS].map(|name| folder.join(name).metadata());
    let modified = weights.into_iter().flatten().next().and_then(|found| found.modified().ok());
    let since = modified.and_then(|modified| modified.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_secs().try_into().unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_any_file_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let more = "additional_chat_templates";
        std::fs::create_dir(folder.path().join(more)).unwrap();
        let more = format!("{more}/tools.jinja");
        let mut seen = vec![version(folder.path())];
        let names = [ADAPTER_CONFIG, "chat_template.jinja", &more, "tokenizer_config.json"];
        let names = names.into_iter().chain([MLX_WEIGHTS, ADAPTER_WEIGHTS]);
        for (name, content) in names.flat_map(|name| [(name, "1"), (name, "11")]) {
            std::fs::write(folder.path().join(name), content).unwrap();
            let now = version(folder.path());
            assert!(!seen.contains(&now), "{name}");
            seen.push(now);
        }
        assert!(created(folder.path()) > 0);
    }

    #[test]
    fn nobody_waits_for_an_adapter_that_takes_long_but_others_that_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for start in ["pissa", "olora", "gaussian"] {
            std::fs::create_dir(path(start)).unwrap();
            let config = serde_json::json!({
                "peft_type": "LORA",
                "r": 8,
                "lora_alpha": 16,
                "target_modules": ["q_proj"],
                "init_lora_weights": start,
            });
            std::fs::write(path(start).join(ADAPTER_CONFIG), config.to_string()).unwrap();
        }
        let adapters = Adapters::default();
        let _searching = adapters.turn_of(&path("pissa")).lock().unwrap();
        assert!(adapters.turn_of(&path("olora")).try_lock().is_err());
        let _reading = adapters.turn_of(&path("gaussian")).try_lock().unwrap();
        assert!(adapters.turn_of(&path("missing")).try_lock().is_err());
    }

    #[test]
    fn a_name_leads_nowhere_else() {
        for name in ["a", "a b", "ft:x", ".hidden"] {
            assert!(is_plain(name), "{name}");
        }
        for name in ["", ".", "..", "a/b", "/a", "../a", "a/", "./a", "a/.."] {
            assert!(!is_plain(name), "{name}");
        }
    }
}
