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
    parse(&bytes).map_err(|message| format!("{}: {message}", path.display()))
}

fn parse(bytes: &[u8]) -> Result<Value, String> {
    files::parse_yaml(bytes.strip_prefix(files::BYTE_ORDER_MARK.as_bytes()).unwrap_or(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_order_mark_is_no_part_of_the_first_key() {
        assert_eq!(parse("\u{feff}rank: 4".as_bytes()), parse(b"rank: 4"));
        assert!(parse(b"rank: 4").unwrap().get("rank").is_some());
    }
}
