//! Reading values of `config.json` with errors that name the file, the key and what was found.

use std::path::Path;

use serde_json::{Map, Value};

use crate::files::{cut, short};
use crate::{Error, Result};

/// An object of the file, whose values are read with errors that name the file and the key.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a> {
    pub path: &'a Path,
    /// What stands before a key's name in errors, with its dot.
    pub place: &'a str,
    pub map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// Another object of the same file, which stands at `place`.
    pub fn of<'b>(&self, place: &'b str, map: &'b Map<String, Value>) -> Keys<'b>
    where
        'a: 'b,
    {
        Keys { path: self.path, place, map }
    }

    pub fn invalid(&self, key: &str, message: impl AsRef<str>) -> Error {
        Error::file(self.path, format!("{}{}: {}", self.place, cut(key), message.as_ref()))
    }

    pub fn unsupported(&self, key: &str, message: impl AsRef<str>) -> Error {
        let (path, place, key) = (self.path.display(), self.place, cut(key));
        Error::Unsupported(format!("{path}: {place}{key} = {}", message.as_ref()))
    }

    pub fn unexpected(&self, key: &str, expected: &str, found: &Value) -> Error {
        self.invalid(key, format!("expected {expected}, found {}", short(found)))
    }

    /// Refuses a key that would change the computation: anything but null and false.
    pub fn refuse(&self, key: &str, instead: &str) -> Result<()> {
        match self.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => Ok(()),
            Some(value) => Err(self.unsupported(key, format!("{}; {instead}", short(value)))),
        }
    }

    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key)
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.unexpected(key, "a name", other)),
        }
    }

    pub fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(self.unexpected(key, "an object", other)),
        }
    }

    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.unexpected(key, "true or false", other)),
        }
    }

    /// A whole number from 0.
    pub fn count(&self, key: &str, default: usize) -> Result<usize> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_u64()
                .and_then(|count| usize::try_from(count).ok())
                .ok_or_else(|| self.unexpected(key, "a whole number from 0", value)),
        }
    }

    /// A whole number from 1 to `max`.
    pub fn size(&self, key: &str, default: usize, max: usize) -> Result<usize> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.filter(|size| (1..=max).contains(size))
            .ok_or_else(|| self.unexpected(key, &format!("a whole number from 1 to {max}"), value))
    }

    /// As [`Self::size`], where null means none.
    pub fn optional_size(
        &self,
        key: &str,
        default: Option<usize>,
        max: usize,
    ) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(_) => self.size(key, max, max).map(Some),
        }
    }

    pub fn number(&self, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value
            .as_f64()
            .filter(|number| number.is_finite())
            .ok_or_else(|| self.unexpected(key, "a number", value))
    }

    pub fn positive(&self, key: &str, default: f64) -> Result<f64> {
        let number = self.number(key, default)?;
        // Some of these are divided by, and are rounded to f32 on the way.
        if number >= f64::from(f32::MIN_POSITIVE) && number <= f64::from(f32::MAX) {
            return Ok(number);
        }
        Err(self.invalid(key, format!("expected a positive number, found {number}")))
    }

    /// As [`Self::positive`], where null means none.
    pub fn optional_positive(&self, key: &str, default: Option<f64>) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(_) => self.positive(key, 1.0).map(Some),
        }
    }

    /// A number from 0; null means none.
    pub fn non_negative(&self, key: &str) -> Result<Option<f64>> {
        if matches!(self.get(key), None | Some(Value::Null)) {
            return Ok(None);
        }
        let number = self.number(key, 0.0)?;
        if (0.0..=f64::from(f32::MAX)).contains(&number) {
            return Ok(Some(number));
        }
        Err(self.invalid(key, format!("expected a number from 0, found {number}")))
    }

    pub fn required(&self, key: &str) -> Result<f64> {
        if self.get(key).is_none() {
            return Err(self.invalid(key, "missing; this rope type needs it"));
        }
        self.positive(key, 1.0)
    }

    pub fn positive_list(&self, key: &str, length: usize) -> Result<Vec<f64>> {
        let expected = format!("a list of {length} positive numbers");
        let Some(value) = self.get(key) else {
            return Err(self.invalid(key, format!("missing; expected {expected}")));
        };
        let numbers = value
            .as_array()
            .ok_or_else(|| self.unexpected(key, &expected, value))?
            .iter()
            .map(|number| number.as_f64().filter(|x| *x as f32 > 0.0 && (*x as f32).is_finite()))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| self.unexpected(key, &expected, value))?;
        if numbers.len() != length {
            return Err(
                self.invalid(key, format!("has {} entries; expected {expected}", numbers.len()))
            );
        }
        Ok(numbers)
    }
}
