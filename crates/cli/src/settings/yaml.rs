//! Reading a file of settings.

use metal_candle::files;
use serde_yaml_ng::Value;
use std::path::Path;

/// The largest file, in bytes.
const LIMIT: u64 = 1 << 20;

/// Reads a file's value. It may be a pipe, as `<(command)` is one.
///
/// # Errors
/// What is wrong with the file, after its name.
pub fn read(path: &Path) -> Result<Value, String> {
    let bytes = files::read_limited_or_piped(path, LIMIT).map_err(|error| error.to_string())?;
    files::parse_yaml(&bytes).map_err(|message| format!("{}: {message}", path.display()))
}
