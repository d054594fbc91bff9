//! Whether a file is the one that the hub announced.
//!
//! The hub's etag is the content's hash: SHA-256 of a file in its large storage, and of others
//! what git calls the blob, the SHA-1 of `blob <bytes>\0` followed by the content. A server whose
//! etags are something else is taken at its word, but for the size, as huggingface_hub does.

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::names::is_hex;

/// The hash of a file as it arrives, by the kind that its etag asks for.
pub(super) enum Check {
    /// Of the content; the etag has 64 hexadecimal digits.
    Sha256(Sha256),
    /// Of git's blob; the etag has 40.
    Git(Sha1),
    /// The etag is no hash that is known here.
    Size,
}

impl Check {
    /// For a file of `size` bytes with this etag.
    pub(super) fn new(etag: &str, size: u64) -> Self {
        if is_hex(etag, 64) {
            Self::Sha256(Sha256::new())
        } else if is_hex(etag, 40) {
            Self::Git(Sha1::new().chain_update(format!("blob {size}\0")))
        } else {
            Self::Size
        }
    }

    /// Takes the next bytes.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            Self::Git(hash) => hash.update(bytes),
            Self::Size => {}
        }
    }

    /// Whether all bytes together are what `etag` says.
    ///
    /// # Errors
    /// What was found instead, for a message.
    pub(super) fn finish(self, etag: &str) -> Result<(), String> {
        let (kind, found) = match self {
            Self::Sha256(hash) => ("SHA-256", hex(&hash.finalize())),
            Self::Git(hash) => ("git's SHA-1", hex(&hash.finalize())),
            Self::Size => return Ok(()),
        };
        if found.eq_ignore_ascii_case(etag) {
            Ok(())
        } else {
            Err(format!("{kind} {found} instead of {etag}"))
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(etag: &str, content: &[u8]) -> Result<(), String> {
        let mut check = Check::new(etag, content.len() as u64);
        content.chunks(3).for_each(|part| check.add(part));
        check.finish(etag)
    }

    #[test]
    fn hashes_are_those_of_sha256sum_and_of_git_hash_object() {
        // printf 'hello\n' | sha256sum, and | git hash-object --stdin
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let git = "ce013625030ba8dba906f756967f9e9ca394464a";
        for etag in [sha256, git] {
            assert_eq!(found(etag, b"hello\n"), Ok(()));
            assert_eq!(found(&etag.to_uppercase(), b"hello\n"), Ok(()));
            let message = found(etag, b"hellO\n").unwrap_err();
            assert!(message.contains(etag), "{message}");
        }
        assert_eq!(found("some-other-kind", b"hellO\n"), Ok(()));
    }
}
