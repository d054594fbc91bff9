//! The tables, and how an older database becomes the newest.

use super::told;
use metal_candle::{Error, Result};
use rusqlite::{Connection, Transaction, TransactionBehavior};
use std::path::Path;
use std::time::Duration;

/// Says whose database it is: "mcsv".
const APPLICATION: i32 = 0x6d63_7376;

/// What each version adds to the one before. Steps that were released stay as they are.
pub(super) const MIGRATIONS: &[&str] = &[
    "
    CREATE TABLE files (
        number      INTEGER PRIMARY KEY AUTOINCREMENT,
        id          TEXT NOT NULL UNIQUE,
        created_at  INTEGER NOT NULL,
        name        TEXT NOT NULL,
        purpose     TEXT NOT NULL,
        bytes       INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE jobs (
        number           INTEGER PRIMARY KEY AUTOINCREMENT,
        id               TEXT NOT NULL UNIQUE,
        created_at       INTEGER NOT NULL,
        finished_at      INTEGER,
        status           TEXT NOT NULL,
        base             TEXT NOT NULL,
        model            TEXT NOT NULL,
        suffix           TEXT,
        training_file    TEXT NOT NULL,
        validation_file  TEXT,
        seed             INTEGER NOT NULL,
        metadata         TEXT,
        hyperparameters  TEXT NOT NULL,
        plan             TEXT,
        trained_tokens   INTEGER,
        estimated_finish INTEGER,
        error            TEXT,
        result_file      TEXT,
        deaths           INTEGER NOT NULL DEFAULT 0,
        model_removed    INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE INDEX jobs_by_status ON jobs (status, number);
    CREATE TABLE events (
        number      INTEGER PRIMARY KEY AUTOINCREMENT,
        id          TEXT NOT NULL UNIQUE,
        job         TEXT NOT NULL REFERENCES jobs (id),
        created_at  INTEGER NOT NULL,
        level       TEXT NOT NULL,
        message     TEXT NOT NULL,
        data        TEXT,
        step        INTEGER,
        place       TEXT,
        UNIQUE (job, step, place)
    ) STRICT;
    CREATE INDEX events_by_job ON events (job, number);
    CREATE TABLE checkpoints (
        number      INTEGER PRIMARY KEY AUTOINCREMENT,
        id          TEXT NOT NULL UNIQUE,
        job         TEXT NOT NULL REFERENCES jobs (id),
        created_at  INTEGER NOT NULL,
        step        INTEGER NOT NULL,
        metrics     TEXT NOT NULL,
        removed     INTEGER NOT NULL DEFAULT 0,
        UNIQUE (job, step)
    ) STRICT;
    CREATE TABLE keys (
        name        TEXT PRIMARY KEY,
        hash        BLOB NOT NULL UNIQUE,
        scopes      TEXT NOT NULL,
        created_at  INTEGER NOT NULL
    ) STRICT;
",
    "
    ALTER TABLE keys ADD COLUMN at_once INTEGER;
    ALTER TABLE keys ADD COLUMN per_minute INTEGER;
",
    "
    CREATE TABLE bases (
        name      TEXT PRIMARY KEY,
        identity  TEXT NOT NULL
    ) STRICT;
",
];

/// Opens a database, which is made if it is missing, and brings it to the newest version. Others may do so meanwhile.
pub(super) fn open(path: &Path) -> Result<Connection> {
    let mut connection = Connection::open(path).map_err(|error| told(path, &error))?;
    // Nothing of another program's is changed.
    let found = begin(&mut connection).map_err(|error| told(path, &error))?;
    check(path, found)?;
    // A new one has nothing in it yet.
    #[cfg(unix)]
    make_private(path);
    set_up(&connection).map_err(|error| told(path, &error))?;
    let transaction = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(|error| told(path, &error))?;
    let found = identity(&transaction).map_err(|error| told(path, &error))?;
    migrate(transaction, check(path, found)?).map_err(|error| told(path, &error))?;
    Ok(connection)
}

/// Lets only this user read a database, which SQLite makes one for all. What SQLite makes beside it later is as the database
/// is. No file is opened for that: to close it would end the locks that SQLite has on it in this process.
#[cfg(unix)]
fn make_private(path: &Path) {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    for beside in ["", "-wal", "-shm"] {
        let mut file = path.as_os_str().to_owned();
        file.push(beside);
        // SQLite makes and removes those beside it as it needs them.
        let Ok(found) = fs::metadata(&file) else { continue };
        if found.permissions().mode() & 0o077 != 0
            && let Err(error) = fs::set_permissions(&file, fs::Permissions::from_mode(0o600))
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!("{}: others can read it: {error}", Path::new(&file).display());
        }
    }
}

/// Whose a database is, its version, and how many tables it has.
type Identity = (i32, i64, i64);

fn identity(connection: &Connection) -> rusqlite::Result<Identity> {
    Ok((
        connection.pragma_query_value(None, "application_id", |row| row.get(0))?,
        connection.pragma_query_value(None, "user_version", |row| row.get(0))?,
        connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?,
    ))
}

/// The identity before anything is done, all of one moment.
fn begin(connection: &mut Connection) -> rusqlite::Result<Identity> {
    connection.busy_timeout(Duration::from_secs(10))?;
    let transaction = connection.transaction()?;
    identity(&transaction)
}

/// The version of a database that can be used.
fn check(path: &Path, (application, version, tables): Identity) -> Result<usize> {
    if application != APPLICATION && (application, version, tables) != (0, 0, 0) {
        return Err(Error::file(path, "is the database of another program; choose another folder"));
    }
    let newest = MIGRATIONS.len();
    usize::try_from(version).ok().filter(|version| *version <= newest).ok_or_else(|| {
        Error::file(
            path,
            format!(
                "has version {version}, and this program knows versions up to {newest}; it was written by a newer one, \
                 which can open it"
            ),
        )
    })
}

fn set_up(connection: &Connection) -> rusqlite::Result<()> {
    connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)
}

fn migrate(transaction: Transaction, version: usize) -> rusqlite::Result<()> {
    for migration in MIGRATIONS.iter().skip(version) {
        transaction.execute_batch(migration)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION)?;
    transaction.pragma_update(None, "user_version", MIGRATIONS.len() as i64)?;
    transaction.commit()
}
