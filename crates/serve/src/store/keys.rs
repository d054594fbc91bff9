//! Keys of those who may ask: a hash of each, never the key.

use super::Store;
use crate::app::now;
use metal_candle::{Error, Result};
use rusqlite::{OptionalExtension, Row, params};

const COLUMNS: &str = "name, scopes, created_at";

/// A key, but for what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// What it is called.
    pub name: String,
    /// What it may do: `chat`, `fine-tune`, `admin`.
    pub scopes: Vec<String>,
    /// When it was made, in seconds since 1970.
    pub created: i64,
}

impl Key {
    fn read(row: &Row) -> rusqlite::Result<Self> {
        let scopes: String = row.get(1)?;
        Ok(Self {
            name: row.get(0)?,
            scopes: scopes.split_whitespace().map(String::from).collect(),
            created: row.get(2)?,
        })
    }
}

impl Store {
    /// All keys, by name.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn keys(&self) -> Result<Vec<Key>> {
        self.read(|connection| {
            let mut statement =
                connection.prepare(&format!("SELECT {COLUMNS} FROM keys ORDER BY name"))?;
            statement.query_map([], Key::read)?.collect()
        })
    }

    /// The key of this hash.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn key_by_hash(&self, sha256: &[u8; 32]) -> Result<Option<Key>> {
        self.read(|connection| {
            let sql = format!("SELECT {COLUMNS} FROM keys WHERE hash = ?1");
            connection.query_row(&sql, [sha256.as_slice()], Key::read).optional()
        })
    }

    /// Adds a key.
    ///
    /// # Errors
    /// When there is one of this name or hash, a scope is not one word, or the database cannot be written.
    pub fn add_key(&self, name: &str, sha256: &[u8; 32], scopes: &[String]) -> Result<()> {
        if let Some(scope) = scopes.iter().find(|scope| scope.split_whitespace().count() != 1) {
            return Err(Error::option("scopes", format!("has {scope:?}, expected single words")));
        }
        let added = self.change(|transaction| {
            transaction.execute(
                "INSERT OR IGNORE INTO keys (name, hash, scopes, created_at) VALUES (?1, ?2, ?3, ?4)",
                params![name, sha256.as_slice(), scopes.join(" "), now()],
            )
        })?;
        match added {
            0 => Err(Error::option("name", format!("there is a key {name:?} already"))),
            _ => Ok(()),
        }
    }

    /// Removes a key; false where there is none.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub fn remove_key(&self, name: &str) -> Result<bool> {
        self.change(|transaction| {
            Ok(transaction.execute("DELETE FROM keys WHERE name = ?1", [name])? > 0)
        })
    }
}
