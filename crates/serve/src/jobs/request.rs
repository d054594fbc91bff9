//! What a request for a job says, and what of it can't be done.

use super::hyperparameters::{Asked, Hyperparameters};
use super::plan::Method;
use crate::error::{ApiError, Result};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Pairs of a job's metadata, at most.
pub(crate) const PAIRS: usize = 16;
const KEY: usize = 64;
const VALUE: usize = 512;
const SUFFIX: usize = 64;
const SEED: i64 = i32::MAX as i64;

/// OpenAI's request for a fine-tuning job.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateJob {
    /// The base, or a fine-tuned model to go on from.
    pub model: String,
    pub training_file: String,
    #[serde(default)]
    pub validation_file: Option<String>,
    #[serde(default)]
    suffix: Option<String>,
    #[serde(default)]
    seed: Option<i64>,
    #[serde(default)]
    metadata: Option<Map<String, Value>>,
    #[serde(default)]
    integrations: Option<Vec<Value>>,
    #[serde(default)]
    method: Option<MethodOf>,
    /// As it was called before there were methods.
    #[serde(default)]
    hyperparameters: Option<Asked>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MethodOf {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    supervised: Option<Options>,
    #[serde(default)]
    dpo: Option<Options>,
    #[serde(default)]
    reinforcement: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    #[serde(default)]
    hyperparameters: Option<Asked>,
}

impl CreateJob {
    /// The hyperparameters.
    ///
    /// # Errors
    /// A 400 that names what can't be done.
    pub fn hyperparameters(&self) -> Result<Hyperparameters> {
        let old = self.hyperparameters;
        let Some(method) = &self.method else {
            return Hyperparameters::new(
                Method::Supervised,
                old.unwrap_or_default(),
                "hyperparameters",
            );
        };
        if method.reinforcement.is_some() {
            return Err(no_reinforcement("method.reinforcement"));
        }
        let (kind, own, other) = match method.kind.as_str() {
            "supervised" => (Method::Supervised, &method.supervised, ("dpo", &method.dpo)),
            "dpo" => (Method::Dpo, &method.dpo, ("supervised", &method.supervised)),
            "reinforcement" => return Err(no_reinforcement("method.type")),
            other => {
                let found = metal_candle::readable(other);
                return Err(ApiError::field(
                    "method.type",
                    format_args!("is {found:?}, expected \"supervised\" or \"dpo\""),
                ));
            }
        };
        if other.1.is_some() {
            return Err(ApiError::field(
                format!("method.{}", other.0),
                format_args!("is given, but method.type is {:?}", method.kind),
            ));
        }
        let own = own.as_ref().and_then(|options| options.hyperparameters);
        if old.is_some() {
            return Err(ApiError::field(
                "hyperparameters",
                format_args!(
                    "is the older word for method.{}.hyperparameters, and there is a method; give one of both",
                    kind.name()
                ),
            ));
        }
        let path = format!("method.{}.hyperparameters", kind.name());
        Hyperparameters::new(kind, own.unwrap_or_default(), &path)
    }

    /// The suffix as it stands in the model's name: in small letters, with `-` for spaces.
    ///
    /// # Errors
    /// A 400 for one that is empty or too long, or has other characters than letters, digits, `-`, `_` and spaces.
    pub fn suffix(&self) -> Result<Option<String>> {
        let Some(suffix) = &self.suffix else { return Ok(None) };
        let length = suffix.chars().count();
        if !(1..=SUFFIX).contains(&length) {
            return Err(ApiError::field(
                "suffix",
                format_args!("has {length} characters, expected 1 to {SUFFIX}"),
            ));
        }
        let allowed =
            |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | ' ');
        if let Some(other) = suffix.chars().find(|letter| !allowed(*letter)) {
            return Err(ApiError::field(
                "suffix",
                format_args!(
                    "has {other:?}, expected letters from a to z, digits, -, _ and spaces"
                ),
            ));
        }
        let words: Vec<&str> = suffix.split_whitespace().collect();
        if words.is_empty() {
            return Err(ApiError::field("suffix", "has nothing but spaces"));
        }
        Ok(Some(words.join("-").to_ascii_lowercase()))
    }

    /// The seed; one is drawn where none is given.
    ///
    /// # Errors
    /// A 400 for one that is out of its range.
    pub fn seed(&self) -> Result<i64> {
        match self.seed {
            Some(seed) if !(0..=SEED).contains(&seed) => Err(ApiError::field(
                "seed",
                format_args!("is {seed}, expected a whole number from 0 to {SEED}"),
            )),
            Some(seed) => Ok(seed),
            None => {
                let drawn = getrandom::u32().map_err(ApiError::internal)?;
                Ok(i64::from(drawn >> 1))
            }
        }
    }

    /// The metadata.
    ///
    /// # Errors
    /// A 400 for too many pairs, for long ones, and for values that are no strings.
    pub fn metadata(&self) -> Result<Option<BTreeMap<String, String>>> {
        let Some(metadata) = &self.metadata else { return Ok(None) };
        if metadata.len() > PAIRS {
            return Err(ApiError::field(
                "metadata",
                format_args!("has {} pairs, expected at most {PAIRS}", metadata.len()),
            ));
        }
        let mut pairs = BTreeMap::new();
        for (key, value) in metadata {
            let shown = metal_candle::readable(key);
            if !(1..=KEY).contains(&key.chars().count()) {
                return Err(ApiError::field(
                    "metadata",
                    format_args!("has the key {shown:?}, expected 1 to {KEY} characters"),
                ));
            }
            let wrong = |what: &str| {
                ApiError::field(
                    format!("metadata.{shown}"),
                    format_args!("is {what}, expected a string of at most {VALUE} characters"),
                )
            };
            let value = value.as_str().ok_or_else(|| wrong("not a string"))?;
            let length = value.chars().count();
            if length > VALUE {
                return Err(wrong(&format!("{length} characters long")));
            }
            pairs.insert(key.clone(), value.to_string());
        }
        Ok(Some(pairs))
    }

    /// Checks that no other program is to be told of the job.
    ///
    /// # Errors
    /// A 400 where one is.
    pub fn check_integrations(&self) -> Result<()> {
        match self.integrations.as_deref() {
            None | Some([]) => Ok(()),
            Some(_) => Err(ApiError::unsupported(
                "integrations",
                "the events and the result file of the job have its figures",
            )),
        }
    }
}

fn no_reinforcement(param: &str) -> ApiError {
    ApiError::unsupported(param, "there are the methods \"supervised\" and \"dpo\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::parse;
    use serde_json::json;

    fn job(fields: Value) -> Result<CreateJob> {
        let mut all = json!({"model": "m", "training_file": "file-a"});
        if let (Value::Object(all), Value::Object(fields)) = (&mut all, fields) {
            all.extend(fields);
        }
        parse(all.to_string().as_bytes())
    }

    /// What is wrong with these fields: the parameter and the message.
    fn wrong(fields: Value) -> (Option<String>, String) {
        let checked = job(fields.clone()).and_then(|job| {
            job.hyperparameters()?;
            job.suffix()?;
            job.seed()?;
            job.metadata()?;
            job.check_integrations()
        });
        let error = checked.expect_err(&fields.to_string());
        (error.param, error.message)
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (fields, param) in [
            (json!({"suffix": ""}), "suffix"),
            (json!({"suffix": "x".repeat(65)}), "suffix"),
            (json!({"suffix": "a/b"}), "suffix"),
            (json!({"suffix": "  "}), "suffix"),
            (json!({"seed": -1}), "seed"),
            (json!({"seed": 1_u64 << 31}), "seed"),
            (json!({"metadata": {"a": 1}}), "metadata.a"),
            (json!({"metadata": {"": "1"}}), "metadata"),
            (json!({"metadata": {"a": "x".repeat(513)}}), "metadata.a"),
            (json!({"integrations": [{"type": "wandb"}]}), "integrations"),
            (json!({"method": {"type": "reinforcement"}}), "method.type"),
            (json!({"method": {"type": "ppo"}}), "method.type"),
            (json!({"method": {"type": "dpo", "supervised": {}}}), "method.supervised"),
            (json!({"method": {"type": "dpo"}, "hyperparameters": {}}), "hyperparameters"),
            (json!({"hyperparameters": {"n_epochs": 0}}), "hyperparameters.n_epochs"),
            (
                json!({"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 3}}}}),
                "method.dpo.hyperparameters.beta",
            ),
            (json!({"hyperparameters": {"n_epochs": "x"}}), "hyperparameters.n_epochs"),
            (json!({"training_file": 1}), "training_file"),
        ] {
            assert_eq!(wrong(fields.clone()).0.as_deref(), Some(param), "{fields}");
        }
        let pairs: Map<String, Value> =
            (0..17).map(|number| (number.to_string(), json!(""))).collect();
        assert_eq!(wrong(json!({"metadata": pairs})).0.as_deref(), Some("metadata"));
        assert!(wrong(json!({"n_epochs": 3})).1.contains("`n_epochs`"));
    }

    #[test]
    fn what_is_right_is_taken() {
        let job = job(json!({
            "suffix": " My model_1 ", "seed": 5, "metadata": {"b": "2", "a": ""}, "integrations": [],
            "validation_file": null, "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": "auto"}}},
        }))
        .unwrap();
        assert_eq!(job.suffix().unwrap().as_deref(), Some("my-model_1"));
        assert_eq!(job.seed().unwrap(), 5);
        assert_eq!(job.metadata().unwrap().unwrap().len(), 2);
        assert_eq!(job.hyperparameters().unwrap().method, Method::Dpo);
        job.check_integrations().unwrap();
        let plain = self::job(json!({})).unwrap();
        assert_eq!(plain.hyperparameters().unwrap().method, Method::Supervised);
        assert!((0..=SEED).contains(&plain.seed().unwrap()));
    }
}
