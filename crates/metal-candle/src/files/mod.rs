//! Reading files with every size checked, and writing them whole or not at all.
//!
//! A file is written under a temporary name in the folder where it will live, flushed to the disk
//! and then renamed, so that whatever interrupts the process (a signal, a full disk, a power cut)
//! the old file stays or the new one is complete. The temporary name is hidden and ends in
//! `.partial-<process>`; it is locked while it is being written, so [`remove_stale_partials`] can
//! tell what a dead process left behind from what a living one is writing.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{CpuStorage, DType, Layout, Storage, Tensor};
use metal_candle_kernels::host;

use crate::{Error, Result};

pub(crate) mod companions;
mod content;
mod read;
mod words;
mod yaml;

pub use companions::{companions, set_chat_template};
pub use content::describe_content;
pub(crate) use content::{
    SAFETENSORS, TABLE_WITH_COMMAS, TABLE_WITH_TABS, describe_binary, describe_text,
};
#[cfg(all(test, target_os = "linux"))]
pub(crate) use read::resident_bytes;
pub use read::{MAX_JSON_BYTES, open_regular, read_json, read_limited, read_limited_or_piped};
pub(crate) use read::{parse_json, read_text, release};
pub use words::plain;
pub(crate) use words::{cut, cut_middle, cut_to, short};
pub use yaml::parse_yaml;

/// What some programs begin a text file with, which is no part of the text.
pub const BYTE_ORDER_MARK: &str = "\u{feff}";

const PARTIAL: &str = ".partial-";
const REPLACED: &str = ".replaced-";
const REMOVED: &str = ".removed-";

/// Writes a file whole or not at all: `write` fills a temporary file in the same folder, which is
/// flushed to the disk and then takes the name `path`. A file that was there before stays until
/// then, also when `write` fails.
///
/// # Errors
/// [`Error::Io`] with the path and what to do, when the folder is missing or read-only, the disk
/// is full, or `write` returns an error.
pub fn write_atomic(
    path: impl AsRef<Path>,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<()> {
    let path = path.as_ref();
    let (parent, name) = parent_and_name(path)?;
    let partial = Partial(parent.join(hidden(&name, PARTIAL)));
    let attempt = || {
        let file = File::create(&partial.0)?;
        lock(&file);
        let mut writer = BufWriter::with_capacity(1 << 20, file.try_clone()?);
        write(&mut writer)?;
        writer.flush()?;
        file.sync_all()?;
        fs::rename(&partial.0, path)?;
        sync_folder(&parent)
    };
    attempt().map_err(|source| write_error(path, source))
}

/// [`write_atomic`] of bytes that are in memory.
///
/// # Errors
/// As [`write_atomic`].
pub fn write_bytes_atomic(path: impl AsRef<Path>, bytes: impl AsRef<[u8]>) -> Result<()> {
    write_atomic(path, |writer| writer.write_all(bytes.as_ref()))
}

/// Writes a folder whole or not at all: `fill` writes into a hidden folder beside it, every file
/// in that is flushed to the disk, and the folder then takes the name `folder`.
///
/// A folder that was there before is set aside for the moment of the exchange and then removed. A
/// process killed in that moment leaves it under a hidden name, and [`remove_stale_partials`] puts
/// it back.
///
/// # Errors
/// What `fill` returns; [`Error::Io`] when the parent folder is missing or read-only or the disk
/// is full; [`Error::File`] when `folder` exists and is a file. The old folder stays in each case.
pub fn write_folder_atomic(
    folder: impl AsRef<Path>,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let folder = folder.as_ref();
    let (parent, name) = parent_and_name(folder)?;
    if folder.exists() && !folder.is_dir() {
        return Err(Error::file(folder, "is a file; a folder is to be written here. Move it away"));
    }
    let staging = Partial(parent.join(hidden(&name, PARTIAL)));
    let at = |path: &Path| {
        let path = path.to_path_buf();
        move |source| write_error(&path, source)
    };
    remove(&staging.0).map_err(at(&staging.0))?;
    fs::create_dir(&staging.0).map_err(at(folder))?;
    // Where a folder cannot be opened as a file there is no lock, and nothing is removed as stale.
    let handle = File::open(&staging.0).ok();
    if let Some(handle) = &handle {
        lock(handle);
    }
    fill(&staging.0)?;
    sync_tree(&staging.0).map_err(at(folder))?;

    let aside = parent.join(hidden(&name, REPLACED));
    let exchange = || {
        if folder.exists() {
            remove(&aside)?;
            fs::rename(folder, &aside)?;
        }
        if let Err(error) = fs::rename(&staging.0, folder) {
            if aside.exists() {
                fs::rename(&aside, folder)?;
            }
            return Err(error);
        }
        sync_folder(&parent)?;
        remove(&aside)
    };
    exchange().map_err(at(folder))
}

/// Removes a folder as a whole: it loses its name at once, and what was in it goes under a hidden
/// name. What a process killed meanwhile leaves there goes with [`remove_stale_partials`]. A folder
/// that does not exist is no error.
///
/// # Errors
/// [`Error::Io`] when the folder cannot be renamed, which leaves it as it was, or not be removed
/// under its hidden name.
pub fn remove_folder_atomic(folder: impl AsRef<Path>) -> Result<()> {
    let folder = folder.as_ref();
    let (parent, name) = parent_and_name(folder)?;
    let aside = parent.join(hidden(&name, REMOVED));
    remove(&aside).map_err(Error::io(&aside))?;
    match fs::rename(folder, &aside) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(write_error(folder, error)),
    }
    sync_folder(&parent).and_then(|()| remove(&aside)).map_err(Error::io(&aside))
}

/// Removes from `parent` what [`write_atomic`], [`write_folder_atomic`] and [`remove_folder_atomic`]
/// left when their process was killed, and puts back a folder that was set aside while its successor
/// never arrived.
/// What another process is writing right now is locked and stays. Gives the paths it removed or
/// put back; a `parent` that does not exist has none.
///
/// # Errors
/// [`Error::Io`] when the folder cannot be read or something in it cannot be removed.
pub fn remove_stale_partials(parent: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    remove_stale(parent.as_ref(), |_| true)
}

/// [`remove_stale_partials`] of what was to take the name `path`, or had it, and of nothing else beside it.
///
/// # Errors
/// As [`remove_stale_partials`].
pub fn remove_stale_partials_of(path: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    let (parent, name) = parent_and_name(path.as_ref())?;
    remove_stale(&parent, |stem| *stem == *name)
}

/// Removes what this process is writing to take the name `path`, as it is about to end without dropping anything. A
/// thread that still writes there gets an error.
pub fn abandon(path: impl AsRef<Path>) {
    let attempt = || -> Result<bool> {
        let (parent, name) = parent_and_name(path.as_ref())?;
        let own = format!(".{}{PARTIAL}{}-", name.to_string_lossy(), std::process::id());
        let mut is_clear = true;
        for entry in fs::read_dir(&parent).map_err(Error::io(&parent))? {
            let entry = entry.map_err(Error::io(&parent))?;
            if !entry.file_name().to_string_lossy().starts_with(&own) {
                continue;
            }
            // Under another name first: of this and its writer's renaming one comes first, and what has its name is whole.
            let aside = parent.join(hidden(&name, REMOVED));
            match fs::rename(entry.path(), &aside) {
                Ok(()) => is_clear &= remove(&aside).is_ok(),
                Err(error) => is_clear &= error.kind() == io::ErrorKind::NotFound,
            }
        }
        Ok(is_clear)
    };
    const ATTEMPTS: usize = 100;
    for _ in 0..ATTEMPTS {
        match attempt() {
            Ok(false) => std::thread::yield_now(),
            _ => return,
        }
    }
}

/// Does what [`remove_stale_partials`] says for the names that are `wanted`.
fn remove_stale(parent: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(parent) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(parent)(error)),
    };
    let mut handled = Vec::new();
    for entry in entries {
        let path = entry.map_err(Error::io(parent))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let wanted_stem = |marker| hidden_stem(name, marker).filter(|stem| wanted(stem));
        if wanted_stem(PARTIAL).is_some() {
            let Ok(file) = File::open(&path) else { continue };
            if file.try_lock().is_ok() {
                remove(&path).map_err(Error::io(&path))?;
                handled.push(path);
            }
        } else if wanted_stem(REMOVED).is_some() {
            remove(&path).map_err(Error::io(&path))?;
            handled.push(path);
        } else if let Some(stem) = wanted_stem(REPLACED) {
            let target = parent.join(stem);
            if target.exists() {
                remove(&path).map_err(Error::io(&path))?;
                handled.push(path);
            } else {
                fs::rename(&path, &target).map_err(Error::io(&path))?;
                handled.push(target);
            }
        }
    }
    Ok(handled)
}

/// Writes tensors as a [safetensors](https://github.com/huggingface/safetensors) file, whole or
/// not at all. Any device and layout is fine: a tensor is brought to the CPU when its turn comes,
/// so no second copy of all of them exists. The same tensors give the same bytes.
///
/// # Errors
/// [`Error::File`] for two tensors of one name, [`Error::Unsupported`] for a dtype other than
/// f64, f32, f16, bf16, i64, i32, i16, u32 and u8, [`Error::Tensor`] when a tensor cannot be
/// copied to the CPU, and those of [`write_atomic`].
pub fn write_safetensors(
    path: impl AsRef<Path>,
    tensors: &[(String, Tensor)],
    metadata: Option<HashMap<String, String>>,
) -> Result<()> {
    let path = path.as_ref();
    let mut order = tensors.iter().collect::<Vec<_>>();
    // Wide types first keeps every tensor aligned, as the format's own writer does.
    order.sort_by(|(a, x), (b, y)| {
        y.dtype().size_in_bytes().cmp(&x.dtype().size_in_bytes()).then_with(|| a.cmp(b))
    });

    let described = order.iter().map(|(name, it)| (name.as_str(), it.dtype(), it.dims()));
    let header = safetensors_header(path, described, metadata)?;
    let mut tensor_error = None;
    let written = write_atomic(path, |writer| {
        writer.write_all(&header)?;
        for (_, tensor) in &order {
            match host::on_the_host(tensor) {
                Ok(tensor) => write_tensor(&tensor, writer)?,
                Err(error) => {
                    tensor_error = Some(error.into());
                    return Err(io::Error::other("a tensor could not be copied"));
                }
            }
        }
        Ok(())
    });
    match tensor_error {
        Some(error) => Err(error),
        None => written,
    }
}

/// What a safetensors file at `path` begins with, before the values of these tensors in this order: names, dtypes and
/// shapes.
pub(crate) fn safetensors_header<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, DType, &'a [usize])>,
    metadata: Option<HashMap<String, String>>,
) -> Result<Vec<u8>> {
    let mut header = serde_json::Map::new();
    if let Some(metadata) = metadata {
        // Sorted, because a hash map's order changes from run to run.
        let sorted = metadata.into_iter().collect::<BTreeMap<_, _>>();
        header.insert("__metadata__".into(), serde_json::json!(sorted));
    }
    let mut offset = 0usize;
    for (name, dtype, shape) in tensors {
        let end = offset + shape.iter().product::<usize>() * dtype.size_in_bytes();
        let dtype = safetensors_dtype(name, dtype)?;
        let entry = serde_json::json!({
            "dtype": dtype, "shape": shape, "data_offsets": [offset, end],
        });
        if name == "__metadata__" || header.insert(name.to_string(), entry).is_some() {
            return Err(Error::file(path, format!("tensor name {name:?} is taken already")));
        }
        offset = end;
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut whole = (header.len() as u64).to_le_bytes().to_vec();
    whole.append(&mut header);
    Ok(whole)
}

/// The values of a tensor on the CPU as a safetensors file has them.
pub(crate) fn tensor_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(tensor.elem_count() * tensor.dtype().size_in_bytes());
    write_tensor(tensor, &mut bytes).map_err(Error::io("a tensor"))?;
    Ok(bytes)
}

/// The format's name of a dtype.
fn safetensors_dtype(name: &str, dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::F64 => "F64",
        DType::F32 => "F32",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::I64 => "I64",
        DType::I32 => "I32",
        DType::I16 => "I16",
        DType::U32 => "U32",
        DType::U8 => "U8",
        other => {
            return Err(Error::Unsupported(format!(
                "writing tensor {name:?} of dtype {other:?} to a safetensors file; \
                 f64, f32, f16, bf16, i64, i32, i16, u32 and u8 can be written"
            )));
        }
    })
}

/// Writes a tensor's values in row-major order, little-endian, as the format asks.
fn write_tensor(tensor: &Tensor, writer: &mut impl Write) -> io::Result<()> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(io::Error::other("the tensor is not on the CPU"));
    };
    match storage {
        CpuStorage::F64(values) => write_values(writer, values, layout, |x| x.to_le_bytes()),
        CpuStorage::F32(values) => write_values(writer, values, layout, |x| x.to_le_bytes()),
        CpuStorage::F16(values) => write_values(writer, values, layout, |x| x.to_le_bytes()),
        CpuStorage::BF16(values) => write_values(writer, values, layout, |x| x.to_le_bytes()),
        CpuStorage::I64(values) => write_values(writer, values, layout, |x| x.to_le_bytes()),
        CpuStorage::I32(values) => write_values(writer, values, layout, |x| x.to_le_bytes()),
        CpuStorage::I16(values) => write_values(writer, values, layout, |x| x.to_le_bytes()),
        CpuStorage::U32(values) => write_values(writer, values, layout, |x| x.to_le_bytes()),
        CpuStorage::U8(values) => write_values(writer, values, layout, |x| [x]),
        // Refused by `safetensors_dtype`.
        _ => Err(io::Error::other("the tensor's dtype cannot be written")),
    }
}

fn write_values<T: Copy, const N: usize>(
    writer: &mut impl Write,
    values: &[T],
    layout: &Layout,
    bytes: impl Fn(T) -> [u8; N],
) -> io::Result<()> {
    let range = layout.contiguous_offsets().and_then(|(start, end)| values.get(start..end));
    let values = range.ok_or_else(|| io::Error::other("the tensor is not contiguous"))?;
    let mut buffer = vec![0; N << 16];
    for chunk in values.chunks(1 << 16) {
        let buffer = &mut buffer[..N * chunk.len()];
        for (place, value) in buffer.chunks_exact_mut(N).zip(chunk) {
            place.copy_from_slice(&bytes(*value));
        }
        writer.write_all(buffer)?;
    }
    Ok(())
}

/// A temporary path that is removed when its writing did not come to the rename.
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.0) {
            tracing::warn!("{}: cannot remove this temporary file: {error}", self.0.display());
        }
    }
}

/// Removes a file or a folder; nothing there is fine.
fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Marks a temporary file as alive for [`remove_stale_partials`]; the lock ends with the process.
/// Some network file systems have no locks. Nothing there can be taken for stale either, so the
/// write goes on without one.
fn lock(file: &File) {
    if let Err(error) = file.lock() {
        tracing::debug!("writing without a lock: {error}");
    }
}

/// The folder a path is in, and its last part.
pub(crate) fn parent_and_name(path: &Path) -> Result<(PathBuf, OsString)> {
    let Some(name) = path.file_name() else {
        return Err(Error::file(path, "has no file name; give the path of a file or folder"));
    };
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    Ok((parent, name.to_os_string()))
}

/// `.name<marker><process>-<count>`. The count keeps two threads that write the same path apart.
fn hidden(name: &OsString, marker: &str) -> OsString {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!("{marker}{}-{count}", std::process::id()));
    hidden
}

/// The `name` of a hidden `.name<marker><digits and dashes>`.
fn hidden_stem<'a>(hidden: &'a str, marker: &str) -> Option<&'a str> {
    let (stem, process) = hidden.strip_prefix('.')?.rsplit_once(marker)?;
    let numbered = !process.is_empty() && process.chars().all(|c| c.is_ascii_digit() || c == '-');
    (numbered && !stem.is_empty()).then_some(stem)
}

/// Flushes every file and folder below `folder`, and the folder itself, to the disk.
fn sync_tree(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            sync_tree(&entry.path())?;
        } else if kind.is_file() {
            File::open(entry.path())?.sync_all()?;
        }
    }
    sync_folder(folder)
}

/// Flushes a folder's list of names, without which a rename may not survive a power cut.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// An [`Error::Io`] that says what to do about it.
pub(crate) fn write_error(path: &Path, source: io::Error) -> Error {
    use io::ErrorKind::{
        NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull,
    };
    let advice = match source.kind() {
        StorageFull | QuotaExceeded => {
            "nothing was written and what was there before is kept; free some space or write elsewhere"
        }
        PermissionDenied | ReadOnlyFilesystem => {
            "this place cannot be written to; change its permissions or write elsewhere"
        }
        NotFound => "the folder to write into does not exist; create it first",
        _ => return Error::Io { path: path.to_path_buf(), source },
    };
    let source = io::Error::new(source.kind(), format!("{source}: {advice}"));
    Error::Io { path: path.to_path_buf(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn names(folder: &Path) -> Vec<String> {
        let mut names = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect::<Vec<_>>();
        names.sort();
        names
    }

    #[test]
    fn a_written_file_replaces_the_old_one_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        write_bytes_atomic(&path, "old").unwrap();
        write_bytes_atomic(&path, "new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(names(folder.path()), ["a.txt"]);
    }

    #[test]
    fn a_failed_write_keeps_the_old_file_and_removes_the_temporary_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        write_bytes_atomic(&path, "old").unwrap();
        let error = write_atomic(&path, |writer| {
            writer.write_all(b"half of it")?;
            Err(io::ErrorKind::StorageFull.into())
        })
        .unwrap_err()
        .to_string();
        assert!(error.contains("a.txt") && error.contains("free some space"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(folder.path()), ["a.txt"]);
    }

    #[test]
    fn the_old_file_stays_until_the_new_one_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        write_bytes_atomic(&path, "old").unwrap();
        // A second name of the old file sees whether its bytes are ever touched.
        let other_name = folder.path().join("b.txt");
        fs::hard_link(&path, &other_name).unwrap();
        write_atomic(&path, |writer| {
            writer.write_all(b"new")?;
            writer.flush()?;
            assert_eq!(fs::read_to_string(&path)?, "old");
            Ok(())
        })
        .unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_to_string(&other_name).unwrap(), "old");
    }

    #[test]
    fn a_missing_folder_is_an_error_that_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let error = write_bytes_atomic(folder.path().join("no/a.txt"), "x").unwrap_err();
        assert!(error.to_string().contains("does not exist; create it"), "{error}");
    }

    #[test]
    fn a_folder_appears_whole_and_replaces_the_old_one() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("checkpoint");
        for content in ["first", "second"] {
            write_folder_atomic(&folder, |staging| {
                assert_eq!(staging.parent(), folder.parent());
                write_bytes_atomic(staging.join("a"), content)?;
                fs::create_dir(staging.join("sub")).map_err(Error::io(staging))?;
                write_bytes_atomic(staging.join("sub/b"), content)
            })
            .unwrap();
            assert_eq!(fs::read_to_string(folder.join("sub/b")).unwrap(), content);
            assert_eq!(names(parent.path()), ["checkpoint"]);
        }
        let error = write_folder_atomic(&folder, |staging| {
            write_bytes_atomic(staging.join("a"), "third")?;
            Err(Error::option("x", "stop"))
        });
        assert!(matches!(error, Err(Error::Option { .. })));
        assert_eq!(fs::read_to_string(folder.join("a")).unwrap(), "second");
        assert_eq!(names(parent.path()), ["checkpoint"]);
    }

    #[test]
    fn stale_partials_go_living_ones_stay_and_a_folder_set_aside_returns() {
        let parent = tempfile::tempdir().unwrap();
        let path = |name: &str| parent.path().join(name);
        fs::write(path(".a.safetensors.partial-123-0"), "x").unwrap();
        fs::create_dir(path(".step-1.partial-99")).unwrap();
        fs::create_dir(path(".step-2.replaced-99")).unwrap();
        fs::create_dir(path(".step-3.replaced-99")).unwrap();
        fs::create_dir(path("step-3")).unwrap();
        fs::create_dir(path(".step-4.removed-99-0")).unwrap();
        fs::write(path(".mine.partial-notes"), "x").unwrap();
        let alive = File::create(path(".b.partial-7-1")).unwrap();
        alive.lock().unwrap();
        assert_eq!(remove_stale_partials(parent.path()).unwrap().len(), 5);
        assert_eq!(
            names(parent.path()),
            [".b.partial-7-1", ".mine.partial-notes", "step-2", "step-3"]
        );
        assert!(remove_stale_partials(path("absent")).unwrap().is_empty());
    }

    #[test]
    fn what_was_to_take_one_name_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let path = |name: &str| parent.path().join(name);
        let own = std::process::id();
        for name in ["out", "other", "out.gguf"] {
            fs::create_dir_all(path(&format!(".{name}.partial-99-0/part"))).unwrap();
            fs::create_dir_all(path(&format!(".{name}.partial-{own}-7/part"))).unwrap();
        }
        let ours = File::open(path(&format!(".out.partial-{own}-7"))).unwrap();
        ours.lock().unwrap();
        assert_eq!(
            remove_stale_partials_of(path("out")).unwrap(),
            [path(".out.partial-99-0")],
            "a living process writes the other one"
        );
        abandon(path("out"));
        let mut left = [".other", ".out.gguf"]
            .map(|name| [format!("{name}.partial-99-0"), format!("{name}.partial-{own}-7")])
            .concat();
        left.sort();
        assert_eq!(names(parent.path()), left);
    }

    #[test]
    fn a_removed_folder_loses_its_name_before_its_files() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("step-1");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("a"), "x").unwrap();
        // What an earlier process of the same number left is in nobody's way.
        fs::create_dir_all(
            parent.path().join(format!(".step-1.removed-{}-0/b", std::process::id())),
        )
        .unwrap();
        remove_folder_atomic(&folder).unwrap();
        remove_folder_atomic(&folder).unwrap();
        remove_stale_partials(parent.path()).unwrap();
        assert!(names(parent.path()).is_empty());
    }

    /// Makes this thread an ordinary user towards files while it lives, as an administrator can remove anything.
    #[cfg(target_os = "linux")]
    struct OrdinaryUser;

    #[cfg(target_os = "linux")]
    impl OrdinaryUser {
        fn new() -> Self {
            const NOBODY: libc::uid_t = 65_534;
            // SAFETY: neither call touches memory, and the second is for this thread alone.
            unsafe {
                if libc::geteuid() == 0 {
                    libc::setfsuid(NOBODY);
                }
            }
            Self
        }
    }

    #[cfg(target_os = "linux")]
    impl Drop for OrdinaryUser {
        fn drop(&mut self) {
            // SAFETY: as above.
            unsafe { libc::setfsuid(libc::geteuid()) };
        }
    }

    /// Whoever looks while a folder is being removed sees it whole or not at all, also when the
    /// removal ends half-way.
    #[cfg(unix)]
    #[test]
    fn a_removal_that_fails_leaves_nothing_under_the_folders_name() {
        use std::os::unix::fs::PermissionsExt;
        #[cfg(target_os = "linux")]
        let _user = OrdinaryUser::new();
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("step-1");
        let stuck = folder.join("stuck");
        fs::create_dir_all(&stuck).unwrap();
        fs::write(folder.join("a"), "x").unwrap();
        fs::write(stuck.join("b"), "x").unwrap();
        fs::set_permissions(&stuck, fs::Permissions::from_mode(0o555)).unwrap();
        assert!(fs::write(stuck.join("c"), "x").is_err(), "this test is for an ordinary user");
        assert!(remove_folder_atomic(&folder).is_err());
        assert!(!folder.exists());
        let hidden = parent.path().join(&names(parent.path())[0]);
        fs::set_permissions(hidden.join("stuck"), fs::Permissions::from_mode(0o755)).unwrap();
        remove_stale_partials(parent.path()).unwrap();
        assert!(names(parent.path()).is_empty());
    }

    #[test]
    fn a_write_in_progress_is_never_stale() {
        let parent = tempfile::tempdir().unwrap();
        write_atomic(parent.path().join("a"), |_| {
            assert!(remove_stale_partials(parent.path()).unwrap().is_empty());
            Ok(())
        })
        .unwrap();
        write_folder_atomic(parent.path().join("b"), |_| {
            assert!(remove_stale_partials(parent.path())?.is_empty());
            Ok(())
        })
        .unwrap();
        assert_eq!(names(parent.path()), ["a", "b"]);
    }

    #[test]
    fn safetensors_written_here_are_read_back_by_the_reference_reader() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.safetensors");
        let device = Device::Cpu;
        let matrix = Tensor::arange(0f32, 6., &device).unwrap().reshape((2, 3)).unwrap();
        let tensors = [
            ("byte".to_string(), Tensor::new(&[1u8, 2, 3], &device).unwrap()),
            ("transposed".to_string(), matrix.t().unwrap()),
            ("half".to_string(), matrix.to_dtype(DType::BF16).unwrap()),
            ("scalar".to_string(), Tensor::new(7i64, &device).unwrap()),
            ("empty".to_string(), Tensor::zeros((0, 4), DType::F32, &device).unwrap()),
        ];
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        write_safetensors(&path, &tensors, Some(metadata)).unwrap();

        let bytes = fs::read(&path).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
        let read = candle_core::safetensors::load(&path, &device).unwrap();
        assert_eq!(read.len(), tensors.len());
        for (name, tensor) in &tensors {
            assert_eq!(read[name].dtype(), tensor.dtype());
            assert_eq!(read[name].dims(), tensor.dims());
            let values = |tensor: &Tensor| {
                let flat = tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
                flat.to_vec1::<f64>().unwrap()
            };
            assert_eq!(values(&read[name]), values(tensor), "{name}");
        }
        assert!(write_safetensors(&path, &[tensors[0].clone(), tensors[0].clone()], None).is_err());
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }
}
