//! Keys of those who may ask: a hash of each, never the key.

use super::{DATABASE, Store, make_private, schema, told, without_database};
use crate::app::{new_id, now};
use crate::keys::{Scope, hash};
use metal_candle::{Error, Result};
use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::Serialize;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

const COLUMNS: &str = "name, scopes, created_at, at_once, per_minute";
/// Characters of a key's name.
const NAME: RangeInclusive<usize> = 1..=64;
const AT_ONCE: RangeInclusive<u32> = 1..=100_000;
const PER_MINUTE: RangeInclusive<u32> = 1..=60_000;

/// How much may be asked with a key; `None` is no limit of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Requests under way at once; one is until its answer is sent.
    pub at_once: Option<u32>,
    /// Requests within any minute.
    pub per_minute: Option<u32>,
}

/// A key, but for what it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Key {
    /// What it is called.
    pub name: String,
    /// What it may do.
    pub scopes: Vec<Scope>,
    /// How much of it.
    pub limits: Limits,
    /// When it was made, in seconds since 1970.
    #[serde(rename = "created_at")]
    pub created: i64,
}

impl Key {
    fn read(row: &Row) -> rusqlite::Result<Self> {
        let scopes: String = row.get(1)?;
        let scope = |name: &str| {
            Scope::named(name).ok_or_else(|| {
                let what = format!("{name:?} is no scope of a key");
                rusqlite::Error::FromSqlConversionFailure(1, Type::Text, what.into())
            })
        };
        Ok(Self {
            name: row.get(0)?,
            scopes: scopes.split_whitespace().map(scope).collect::<Result<_, _>>()?,
            created: row.get(2)?,
            limits: Limits { at_once: row.get(3)?, per_minute: row.get(4)? },
        })
    }
}

/// The keys of a data folder, which a server may be using meanwhile: it obeys with its next request.
#[derive(Debug)]
pub struct Keys {
    path: PathBuf,
    connection: Connection,
}

impl Keys {
    /// Opens those of a folder that a server has used.
    ///
    /// # Errors
    /// When there is no database, or it cannot be used.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(DATABASE);
        if !path.exists() {
            return Err(Error::file(path, "is not there, so no server has kept anything here"));
        }
        let connection = schema::open(&path)?;
        Ok(Self { path, connection })
    }

    /// Whether a folder has any; one that no server has used has none.
    ///
    /// # Errors
    /// When its database cannot be used.
    pub fn has_any(folder: &Path) -> Result<bool> {
        Ok(folder.join(DATABASE).exists() && !Self::open(folder)?.list()?.is_empty())
    }

    /// Opens those of a folder, which is made if it is missing.
    ///
    /// # Errors
    /// When its database is another program's or a newer version's, when there are files without a database, and when
    /// it cannot be written.
    pub fn open_or_make(folder: &Path) -> Result<Self> {
        make_private(folder)?;
        let path = folder.join(DATABASE);
        if !path.exists() {
            without_database(folder)?;
        }
        let connection = schema::open(&path)?;
        Ok(Self { path, connection })
    }

    /// All of them, by name.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn list(&self) -> Result<Vec<Key>> {
        let read = || -> rusqlite::Result<Vec<Key>> {
            let sql = format!("SELECT {COLUMNS} FROM keys ORDER BY name");
            let mut statement = self.connection.prepare(&sql)?;
            statement.query_map([], Key::read)?.collect()
        };
        read().map_err(|error| told(&self.path, &error))
    }

    /// Makes a key and gives it. It is kept nowhere, only its hash is.
    ///
    /// # Errors
    /// When there is one of this name, a value is out of its range, or the database cannot be written.
    pub fn add(&self, name: &str, scopes: &[Scope], limits: Limits) -> Result<String> {
        check(name, scopes, limits)?;
        // 48 letters of 5 random bits each.
        let key = new_id(&new_id("sk-"));
        let scopes: Vec<&str> = scopes.iter().map(|scope| scope.name()).collect();
        let added = self.connection.execute(
            "INSERT OR IGNORE INTO keys (name, hash, scopes, created_at, at_once, per_minute)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            params![
                name,
                hash(&key).as_slice(),
                scopes.join(" "),
                now(),
                limits.at_once,
                limits.per_minute
            ],
        );
        match added.map_err(|error| told(&self.path, &error))? {
            0 => Err(Error::option("name", format!("there is a key {name:?} already"))),
            _ => Ok(key),
        }
    }

    /// Removes a key; false where there is none of this name.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub fn remove(&self, name: &str) -> Result<bool> {
        let removed = self.connection.execute("DELETE FROM keys WHERE name = ?1", [name]);
        removed.map(|count| count > 0).map_err(|error| told(&self.path, &error))
    }
}

/// That a key can be so.
fn check(name: &str, scopes: &[Scope], limits: Limits) -> Result<()> {
    let length = name.chars().count();
    let allowed = |letter: char| letter.is_alphanumeric() || "-_.@+".contains(letter);
    if !NAME.contains(&length) || !name.chars().all(allowed) {
        let (least, most) = NAME.into_inner();
        return Err(Error::option(
            "name",
            format!(
                "is {:?}, expected {least} to {most} letters, digits, and -, _, ., @ or +",
                metal_candle::readable(name)
            ),
        ));
    }
    if scopes.is_empty() {
        return Err(Error::option("scopes", "are none, expected one at least"));
    }
    for (option, given, range) in
        [("at_once", limits.at_once, AT_ONCE), ("per_minute", limits.per_minute, PER_MINUTE)]
    {
        if let Some(given) = given.filter(|given| !range.contains(given)) {
            let (least, most) = range.into_inner();
            let what = format!("is {given}, expected a whole number from {least} to {most}");
            return Err(Error::option(option, what));
        }
    }
    Ok(())
}

impl Store {
    /// Whether there is any key.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn has_keys(&self) -> Result<bool> {
        self.read(|connection| {
            connection.query_row("SELECT EXISTS (SELECT 1 FROM keys)", [], |row| row.get(0))
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
}
