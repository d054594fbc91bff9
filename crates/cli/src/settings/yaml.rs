//! Reading YAML: how large and how deep it is, is known before it is parsed.

use super::keys::cut;
use metal_candle::files;
use serde_yaml_ng::Value;
use std::path::Path;

/// The largest file, in bytes.
const LIMIT: u64 = 1 << 20;
/// The most `[` and `{` in a file. The parser looks at all that are open again and again, so a hundred thousand of them
/// keep it busy for minutes; settings have a few.
const BRACKETS: usize = 1000;

/// Reads a file's value. It may be a pipe, as `<(command)` is one.
///
/// # Errors
/// What is wrong with the file, after its name.
pub fn read(path: &Path) -> Result<Value, String> {
    let named = |message: String| format!("{}: {message}", path.display());
    let bytes = files::read_limited_or_piped(path, LIMIT).map_err(|error| error.to_string())?;
    parse(&bytes).map_err(named)
}

fn parse(bytes: &[u8]) -> Result<Value, String> {
    let brackets = bytes.iter().filter(|byte| b"[{".contains(byte)).count();
    if brackets > BRACKETS {
        return Err(format!("has {brackets} brackets [ and {{; at most {BRACKETS} are read"));
    }
    serde_yaml_ng::from_slice(bytes).map_err(|error| match files::describe_content(bytes) {
        Some(what) => format!("is {what}; YAML was expected"),
        None => malformed(&error),
    })
}

/// What is wrong with a text that is no YAML.
fn malformed(error: &serde_yaml_ng::Error) -> String {
    let text = error.to_string();
    match text.strip_prefix("duplicate entry with key ") {
        Some(key) => format!("the key {} stands there twice; keep one of them", cut(key)),
        None => format!("is not YAML: {text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn nesting_without_end_and_aliases_that_multiply_are_refused() {
        let bomb = |levels: usize| {
            let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
            for level in 1..levels {
                let list = vec![format!("*a{}", level - 1); 9].join(", ");
                text += &format!("a{level}: &a{level} [{list}]\n");
            }
            text
        };
        for text in [
            "[".repeat(100_000),
            "{a: ".repeat(100_000),
            "- ".repeat(100_000),
            "? ".repeat(100_000),
            "[".repeat(900),
            format!("a: {}", "!a ".repeat(100_000)),
            bomb(30),
            "a: &a [*a]".into(),
            "a: *b".into(),
            "a: [1".into(),
            "a: 1\n\tb: 2".into(),
        ] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.len() < 300, "{error}");
        }
        assert!(parse(b"rank: 4\nkeys: [a, b]\nprompt: 'a [ b'").is_ok());
        assert!(parse(b"PK\x03\x04").unwrap_err().contains("zip archive"));
    }
}
