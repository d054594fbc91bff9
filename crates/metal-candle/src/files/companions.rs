//! The files that stand beside a model's weights and its `config.json`: what is downloaded, read and copied.

use std::path::{Path, PathBuf};

use super::{cut, read_limited, remove_folder_atomic, write_bytes_atomic};
use crate::gguf::is_gguf;
use crate::text::TokenizerFiles;
use crate::{Error, Result};

pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";
pub(crate) const TOKENIZER: &str = "tokenizer.json";
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub(crate) const SPECIAL_TOKENS: &str = "special_tokens_map.json";
/// A SentencePiece model, which other programs read.
pub(crate) const SENTENCE_PIECE: &str = "tokenizer.model";
/// The file of a chat template, in a model's folder and beside an adapter.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// A processor's chat template.
pub(crate) const PROCESSOR_TEMPLATE: &str = "chat_template.json";
/// The folder of further chat templates, each `<name>.jinja`.
const MORE_TEMPLATES: &str = "additional_chat_templates";

/// All of them, but for [`MORE_TEMPLATES`].
const COMPANIONS: [&str; 10] = [
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    SENTENCE_PIECE,
    SPECIAL_TOKENS,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE,
    PROCESSOR_TEMPLATE,
];

/// The largest of them that is copied, in bytes.
const MAX_BYTES: u64 = 1 << 30;

/// Whether a file is one of them, by its path in the model's folder, with `/` between.
pub(crate) fn is_companion(path: &str) -> bool {
    match path.split_once('/') {
        None => COMPANIONS.contains(&path),
        Some((folder, name)) => {
            folder == MORE_TEMPLATES && !name.contains('/') && is_template(Path::new(name))
        }
    }
}

/// Those in a folder.
///
/// # Errors
/// [`Error::Io`] when the folder of chat templates cannot be read.
pub fn companions(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> =
        COMPANIONS.iter().map(|name| folder.join(name)).filter(|path| path.is_file()).collect();
    found.extend(more_templates(folder)?);
    Ok(found)
}

/// The files of further chat templates in a folder, in the order of their names.
pub(crate) fn more_templates(folder: &Path) -> Result<Vec<PathBuf>> {
    let more = folder.join(MORE_TEMPLATES);
    let mut found = Vec::new();
    if more.is_dir() {
        for entry in std::fs::read_dir(&more).map_err(Error::io(&more))? {
            found.push(entry.map_err(Error::io(&more))?.path());
        }
    }
    found.retain(|path| is_template(path));
    found.sort();
    Ok(found)
}

fn is_template(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "jinja")
}

/// Where a folder has the chat template of a name.
///
/// # Errors
/// [`Error::File`] for a name that is no file's, [`Error::Io`] when its folder cannot be made.
pub(crate) fn template_path(folder: &Path, name: &str) -> Result<PathBuf> {
    if name == "default" {
        return Ok(folder.join(CHAT_TEMPLATE));
    }
    let more = folder.join(MORE_TEMPLATES);
    if Path::new(name).file_name() != Some(name.as_ref()) || name.contains('\\') {
        return Err(Error::file(
            more,
            format!("cannot have a chat template named {:?}", cut(name)),
        ));
    }
    std::fs::create_dir_all(&more).map_err(Error::io(&more))?;
    Ok(more.join(format!("{name}.jinja")))
}

/// Copies those of the folder `from`, or what a GGUF file has in their place, into the folder `to`.
pub(crate) fn copy_companions(from: &Path, to: &Path) -> Result<()> {
    if is_gguf(from) {
        return TokenizerFiles::read(from)?.write(to);
    }
    // A folder without such files has nothing to copy; one that is gone had.
    std::fs::metadata(from).map_err(Error::io(from))?;
    for path in companions(from)? {
        let Ok(name) = path.strip_prefix(from) else {
            return Err(Error::file(path, format!("is not in {}", from.display())));
        };
        let target = to.join(name);
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent).map_err(Error::io(parent))?;
        }
        write_bytes_atomic(&target, read_limited(&path, MAX_BYTES)?)?;
    }
    Ok(())
}

/// Gives the model in a folder this chat template in place of its own, also of those for tools, which would be
/// preferred to it.
///
/// # Errors
/// [`Error::Io`] when a file cannot be written or removed.
pub fn set_chat_template(folder: &Path, source: &str) -> Result<()> {
    write_bytes_atomic(folder.join(CHAT_TEMPLATE), source)?;
    let other = folder.join(PROCESSOR_TEMPLATE);
    match std::fs::remove_file(&other) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::io(&other)(error));
        }
        _ => {}
    }
    remove_folder_atomic(folder.join(MORE_TEMPLATES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_companions_has_none_and_one_that_is_gone_is_an_error() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        copy_companions(from.path(), to.path()).unwrap();
        assert!(companions(to.path()).unwrap().is_empty());
        let error = copy_companions(&from.path().join("gone"), to.path()).unwrap_err();
        assert!(error.to_string().contains("gone"), "{error}");
    }

    #[test]
    fn a_copy_has_all_companions_and_a_template_set_over_them_is_the_only_one() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let write = |name: &str, bytes: &[u8]| {
            let path = from.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        };
        let tools = "additional_chat_templates/tool_use.jinja";
        let mut names: Vec<&str> = COMPANIONS.to_vec();
        names.push(tools);
        for name in &names {
            // Copied as bytes, whatever they are.
            write(name, format!("{name}\r\n\u{0}").as_bytes());
        }
        for other in ["model.safetensors", "config.json", "additional_chat_templates/notes.txt"] {
            write(other, b"not copied");
            assert!(!is_companion(other), "{other}");
        }
        copy_companions(from.path(), to.path()).unwrap();
        for name in &names {
            assert!(is_companion(name), "{name}");
            let read = |folder: &Path| std::fs::read(folder.join(name)).unwrap();
            assert_eq!(read(to.path()), read(from.path()), "{name}");
        }
        let copied = companions(to.path()).unwrap();
        assert_eq!(copied.len(), names.len());
        assert!(!to.path().join("additional_chat_templates/notes.txt").exists());
        assert!(!to.path().join("model.safetensors").exists());

        set_chat_template(to.path(), "own").unwrap();
        assert_eq!(std::fs::read(to.path().join(CHAT_TEMPLATE)).unwrap(), b"own");
        let left = companions(to.path()).unwrap();
        assert_eq!(left.len(), names.len() - 2);
        assert!(!to.path().join("additional_chat_templates").exists());
        for path in ["additional_chat_templates/a/b.jinja", "other/a.jinja", "a/tokenizer.json"] {
            assert!(!is_companion(path), "{path}");
        }
        // There is nothing to remove the second time.
        set_chat_template(to.path(), "own").unwrap();
    }
}
