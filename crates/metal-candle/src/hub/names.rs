//! What names, commits and etags may look like. All of them become parts of paths and addresses,
//! and most of them come from a server.

/// The longest name of a file, in bytes, that file systems take.
const MAX_NAME: usize = 255;
/// The longest path of a file in a repository, in bytes.
const MAX_PATH: usize = 1024;

/// A file's name without folders, in characters that need no escape in an address.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME
        && !name.starts_with('.')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// The path of a file in a repository, which stays below the folder that it is joined to.
pub(super) fn is_path(path: &str) -> bool {
    let forbidden = |c: char| {
        c.is_control()
            || c == '\\'
            || (cfg!(windows) && ['<', '>', ':', '"', '|', '?', '*'].contains(&c))
    };
    path.len() <= MAX_PATH
        && path.split('/').all(|part| {
            !part.is_empty()
                && part.len() <= MAX_NAME
                && part != "."
                && part != ".."
                && !part.chars().any(forbidden)
        })
}

/// `owner/name`, by the hub's rules.
pub(super) fn is_id(id: &str) -> bool {
    let part = |part: &str| {
        is_name(part) && part.len() <= 96 && !part.contains("--") && !part.contains("..")
    };
    id.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

/// A branch, a tag, a commit or another reference such as `refs/pr/1`.
pub(super) fn is_revision(revision: &str) -> bool {
    revision.len() <= MAX_PATH
        && revision.split('/').all(|part| is_name(part) && !part.contains(".."))
}

pub(super) fn is_commit(commit: &str) -> bool {
    is_hex(commit, 40)
}

/// Whether `text` is `digits` hexadecimal digits.
pub(super) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.chars().all(|c| c.is_ascii_hexdigit())
}

/// The name that an etag (`"..."` or `W/"..."`) has in the cache, if it can have one.
pub(super) fn etag(header: &str) -> Option<String> {
    let etag = header.trim();
    let etag = etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"');
    // What follows a dot tells unfinished files from finished ones.
    (is_name(etag) && !etag.contains('.')).then(|| etag.to_string())
}

/// `text` for an address's path: `/` stays if `slashes`, and becomes `%2F` otherwise.
pub(super) fn escape(text: &str, slashes: bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) || (slashes && byte == b'/') {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stays_below_its_folder() {
        for path in ["a", "data/train-0.parquet", "a b/ü.jsonl", ".hidden/..x", "a..b"] {
            assert!(is_path(path), "{path}");
        }
        let long = "x".repeat(256);
        for path in [
            "",
            "/a",
            "a/",
            "a//b",
            "..",
            "../a",
            "a/../b",
            "a/..",
            "./a",
            "a\\b",
            "a\0b",
            "a\u{1b}[2J",
            "a\nb",
            &long,
        ] {
            assert!(!is_path(path), "{path:?}");
        }
    }

    #[test]
    fn an_etag_is_a_name_without_its_quotes() {
        assert_eq!(etag("\"abc-1\"").as_deref(), Some("abc-1"));
        assert_eq!(etag("W/\"abc\"").as_deref(), Some("abc"));
        assert_eq!(etag(" abc ").as_deref(), Some("abc"));
        for bad in ["", "\"\"", "../x", "a/b", "x.incomplete", "a b"] {
            assert_eq!(etag(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn an_address_is_escaped() {
        assert_eq!(escape("a b/ü#?%.x", true), "a%20b/%C3%BC%23%3F%25.x");
        assert_eq!(escape("refs/pr/1", false), "refs%2Fpr%2F1");
    }
}
