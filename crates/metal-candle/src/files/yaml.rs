//! YAML that nobody vouches for: how deep it is nested is known before it is parsed.

use serde::de::DeserializeOwned;

use super::content::describe_content;
use super::words::cut;

/// How deep YAML may be nested. The parser looks at everything that is open again and again, so a hundred thousand
/// brackets, of a byte each, keep it busy for minutes.
const DEEPEST: usize = 64;

/// Reads YAML into a type.
///
/// # Errors
/// What is wrong with it, in words that follow the file's name.
pub fn parse_yaml<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    if depth(bytes) > DEEPEST {
        return Err(format!(
            "is nested more than {DEEPEST} deep by its brackets and dashes, which is more than is read"
        ));
    }
    serde_yaml_ng::from_slice(bytes).map_err(|error| match describe_content(bytes) {
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

/// How deep YAML is nested by its brackets, and by the marks of lists and keys one after the other. Indents cost more
/// bytes the deeper they are.
fn depth(yaml: &[u8]) -> usize {
    let (mut brackets, mut deepest) = (0usize, 0);
    for line in yaml.split(|byte| *byte == b'\n') {
        let start = line.iter().position(|byte| !b" \t-?".contains(byte)).unwrap_or(line.len());
        let (opening, content) = line.split_at_checked(start).unwrap_or((line, &[]));
        let followed = opening.iter().skip(1).chain([&b' ']);
        let marks = opening
            .iter()
            .zip(followed)
            .filter(|(byte, next)| b"-?".contains(byte) && b" \t".contains(next))
            .count();
        deepest = deepest.max(brackets + marks);
        for byte in content {
            match byte {
                b'[' | b'{' => brackets += 1,
                b']' | b'}' => brackets = brackets.saturating_sub(1),
                _ => {}
            }
            deepest = deepest.max(brackets);
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::parse_yaml;
    use serde_yaml_ng::Value;

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
        let parse = |text: &str| parse_yaml::<Value>(text.as_bytes());
        for text in [
            "[".repeat(100_000),
            "{a: ".repeat(100_000),
            "- ".repeat(100_000),
            "? ".repeat(100_000),
            "[".repeat(65),
            format!("{}a", "- ".repeat(65)),
            format!("a: {}", "!a ".repeat(100_000)),
            bomb(30),
            "a: &a [*a]".into(),
            "a: *b".into(),
            "a: [1".into(),
            "a: 1\n\tb: 2".into(),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.len() < 300, "{error}");
        }
        for deep in [format!("{}a", "- ".repeat(65)), "[".repeat(65)] {
            assert!(parse(&deep).unwrap_err().contains("nested more than 64 deep"));
        }
        assert!(parse("rank: 4\nkeys: [a, b]\nprompt: 'a [ b'").is_ok());
        // A rule across a text is no list.
        assert!(parse(&format!("prompt: |\n  {}\n  text", "-".repeat(100))).is_ok());
        let balanced = format!("prompt: '{}'", "[a]".repeat(2000));
        assert!(parse(&balanced).is_ok());
        assert!(parse("PK\x03\x04").unwrap_err().contains("zip archive"));
        assert!(parse("a: 1\na: 2").unwrap_err().contains("the key \"a\" stands there twice"));
    }
}
