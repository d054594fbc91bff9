//! `jobs download`: an adapter from a server into a folder.

use super::{id, path};
use crate::output::{self, Terminal, bytes};
use crate::progress::Bar;
use crate::remote::Client;
use crate::run_folder;
use anyhow::Context;
use clap::Args;
use metal_candle::files;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Files of an adapter, at most.
const MOST: usize = 32;

/// What the command is told.
#[derive(Debug, Args)]
pub struct Download {
    /// The job's id
    #[arg(value_parser = id)]
    job: String,
    /// The checkpoint of this step [default: the end of the job]
    #[arg(long, value_name = "N")]
    step: Option<u64>,
    /// The folder to write; it must not exist, or be empty [default: the job's id]
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Fetches an adapter.
pub fn run(client: &Client, download: &Download, terminal: Terminal) -> anyhow::Result<()> {
    let output = download.output.clone().unwrap_or_else(|| PathBuf::from(&download.job));
    let step = download.step.map(|step| format!("?step={step}")).unwrap_or_default();
    let archive =
        client.download(&format!("{}/adapter{step}", path(&download.job)), "application/x-tar")?;
    let _lock = run_folder::take_new(&output, &[])?;
    let bar = Bar::new(terminal, "{spinner} {bytes} fetched", 0);
    let reader: Box<dyn Read> = match bar.drawn() {
        Some(bar) => Box::new(bar.wrap_read(archive)),
        None => Box::new(archive),
    };
    let mut written = Vec::new();
    files::write_folder_atomic(&output, |folder| {
        unpack(reader, folder, &mut written).map_err(metal_candle::Error::io(&output))
    })
    .with_context(|| format!("cannot fetch the adapter of {}", download.job))?;
    drop(bar);
    if terminal.json {
        let files: Vec<String> =
            written.iter().map(|(name, _)| output::path(&output.join(name))).collect();
        return output::json(&serde_json::json!({"output": output::path(&output), "files": files}));
    }
    let size = written.iter().map(|(_, size)| size).sum();
    output::line(format!("{} has the adapter, {}", output.display(), bytes(size)))
}

/// Writes the files of an archive's one folder, and gives their names and sizes. What isn't such a file is refused: an
/// archive could name any place.
fn unpack(
    reader: impl Read,
    folder: &Path,
    written: &mut Vec<(String, u64)>,
) -> std::io::Result<()> {
    let wrong = |what: String| std::io::Error::new(std::io::ErrorKind::InvalidData, what);
    let mut archive = tar::Archive::new(reader);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let bytes = entry.path_bytes().into_owned();
        let path = String::from_utf8_lossy(&bytes).into_owned();
        let (of_folder, name) = path.split_once('/').unwrap_or_default();
        let name = Some(name).filter(|name| is_plain(of_folder) && is_plain(name));
        let is_file = entry.header().entry_type().is_file();
        let Some(name) = name.filter(|_| is_file) else {
            let shown = crate::settings::cut(&path);
            return Err(wrong(format!(
                "the server's archive has {shown:?}, which is no file of an adapter"
            )));
        };
        if written.len() == MOST || written.iter().any(|(other, _)| other == name) {
            return Err(wrong(format!("the server's archive has {name} twice, or too many files")));
        }
        let size = entry.size();
        let mut file = std::fs::File::create_new(folder.join(name))?;
        if std::io::copy(&mut entry, &mut file)? != size {
            return Err(wrong(format!("the server's archive ends within {name}")));
        }
        written.push((name.into(), size));
    }
    match written.is_empty() {
        true => Err(wrong("the server's archive is empty".into())),
        false => Ok(()),
    }
}

/// Whether a name is one of a file in a folder, and nothing more.
fn is_plain(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !name.is_empty() && !name.starts_with('.') && name.len() <= 128 && name.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(files: &[(&str, tar::EntryType)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, kind) in files {
            let mut header = tar::Header::new_gnu();
            let name = &mut header.as_old_mut().name;
            name[..path.len()].copy_from_slice(path.as_bytes());
            header.set_size(3);
            header.set_entry_type(*kind);
            header.set_cksum();
            builder.append(&header, &b"abc"[..]).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn unpacked(bytes: &[u8]) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let mut written = Vec::new();
        unpack(bytes, folder.path(), &mut written).map_err(|error| error.to_string())?;
        for (name, size) in &written {
            assert_eq!(std::fs::read(folder.path().join(name)).unwrap().len() as u64, *size);
        }
        Ok(written.into_iter().map(|(name, _)| name).collect())
    }

    #[test]
    fn an_adapters_files_are_unpacked_and_nothing_else_is() {
        use tar::EntryType::{Regular, Symlink};
        let good = archive(&[("job/a.json", Regular), ("job/b.safetensors", Regular)]);
        assert_eq!(unpacked(&good).unwrap(), ["a.json", "b.safetensors"]);
        for path in ["../a", "/etc/a", "job/../a", "job/.a", "job/b/c", "a", "job/"] {
            assert!(unpacked(&archive(&[(path, Regular)])).is_err(), "{path}");
        }
        assert!(unpacked(&archive(&[("job/a", Symlink)])).is_err());
        assert!(unpacked(&archive(&[("job/a", Regular), ("job/a", Regular)])).is_err());
        assert!(unpacked(&archive(&[])).is_err());
        for end in [1, 511, 514, 1023, 1025] {
            assert!(unpacked(&good[..end]).is_err(), "{end}");
        }
    }
}
