//! Hyperparameters: `"auto"` or a number each, and what `"auto"` stands for.
//!
//! | Hyperparameter | `"auto"` |
//! |---|---|
//! | `n_epochs` | 3; of few examples so many that 100 are seen, at most 25; of many so few that 25 000 are seen, at least 1 (OpenAI's cookbook) |
//! | `batch_size` | 0.2 % of the examples, at least the library's default, at most 32, and never more than there are |
//! | `learning_rate_multiplier` | 1, times the library's rate for LoRA; a 20th of that for preferences |
//! | `beta` | the library's default for DPO, 0.1 |

use super::plan::Method;
use crate::error::{ApiError, Result};
use metal_candle::data::BatchOptions;
use metal_candle::train::objectives::DpoOptions;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeInclusive;

const EPOCHS: RangeInclusive<u32> = 1..=50;
const BATCH: RangeInclusive<u32> = 1..=256;
/// The largest multiplier: the library's largest rate is further up, and no model learns at either.
const MULTIPLIER: f64 = 1e6;
const BETA: f64 = 2.0;
/// Epochs where there are neither few nor many examples.
const USUAL_EPOCHS: u64 = 3;
const MOST_AUTO_EPOCHS: u64 = 25;
/// Examples that a run sees at least, and at most.
const SEEN: RangeInclusive<u64> = 100..=25_000;
const MOST_AUTO_BATCH: u64 = 32;

/// `"auto"` or a number.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) enum Auto<T> {
    #[default]
    Auto,
    Is(T),
}

impl<T> Auto<T> {
    fn or(self, chosen: impl FnOnce() -> T) -> T {
        match self {
            Self::Auto => chosen(),
            Self::Is(value) => value,
        }
    }
}

impl<T: Serialize> Serialize for Auto<T> {
    fn serialize<S: serde::Serializer>(
        &self,
        serializer: S,
    ) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Is(value) => value.serialize(serializer),
        }
    }
}

/// A number of JSON as one of these types.
pub(crate) trait Number: Sized {
    fn of(value: f64) -> Option<Self>;
}

impl Number for u32 {
    fn of(value: f64) -> Option<Self> {
        let whole = value.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&value);
        whole.then_some(value as u32)
    }
}

impl Number for f64 {
    fn of(value: f64) -> Option<Self> {
        value.is_finite().then_some(value)
    }
}

impl<'de, T: Number> Deserialize<'de> for Auto<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Seen<T>(PhantomData<T>);

        impl<T: Number> Seen<T> {
            fn number<E: de::Error>(value: f64) -> std::result::Result<Auto<T>, E> {
                let unexpected = de::Unexpected::Float(value);
                let expected = &"\"auto\" or a number in range";
                T::of(value).map(Auto::Is).ok_or_else(|| E::invalid_value(unexpected, expected))
            }
        }

        impl<T: Number> Visitor<'_> for Seen<T> {
            type Value = Auto<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("\"auto\" or a number")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<Self::Value, E> {
                match text {
                    "auto" => Ok(Auto::Auto),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> std::result::Result<Self::Value, E> {
                Self::number(value as f64)
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> std::result::Result<Self::Value, E> {
                Self::number(value as f64)
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> std::result::Result<Self::Value, E> {
                Self::number(value)
            }
        }
        deserializer.deserialize_any(Seen(PhantomData))
    }
}

/// What a request says of the hyperparameters of a method.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Asked {
    pub n_epochs: Option<Auto<u32>>,
    pub batch_size: Option<Auto<u32>>,
    pub learning_rate_multiplier: Option<Auto<f64>>,
    /// Of DPO alone.
    pub beta: Option<Auto<f64>>,
}

/// The hyperparameters of a job: as asked for, and once its data are known as chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Hyperparameters {
    pub method: Method,
    pub n_epochs: Auto<u32>,
    pub batch_size: Auto<u32>,
    pub learning_rate_multiplier: Auto<f64>,
    pub beta: Auto<f64>,
}

/// The numbers of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Chosen {
    pub n_epochs: u32,
    pub batch_size: u32,
    pub learning_rate_multiplier: f64,
    pub beta: f64,
}

impl Hyperparameters {
    /// Those of a method, whose place in the request is `path`.
    ///
    /// # Errors
    /// A 400 that names the first that is out of its range.
    pub fn new(method: Method, asked: Asked, path: &str) -> Result<Self> {
        let whole = |name: &str, value: Option<Auto<u32>>, range: RangeInclusive<u32>| match value {
            Some(Auto::Is(value)) if !range.contains(&value) => Err(ApiError::field(
                format!("{path}.{name}"),
                format_args!(
                    "is {value}, expected \"auto\" or a whole number from {} to {}",
                    range.start(),
                    range.end()
                ),
            )),
            value => Ok(value.unwrap_or_default()),
        };
        let above_zero = |name: &str, value: Option<Auto<f64>>, most: f64| match value {
            Some(Auto::Is(value)) if !(value > 0.0 && value <= most) => Err(ApiError::field(
                format!("{path}.{name}"),
                format_args!("is {value}, expected \"auto\" or a number above 0, at most {most}"),
            )),
            value => Ok(value.unwrap_or_default()),
        };
        if method == Method::Supervised && asked.beta.is_some() {
            return Err(ApiError::field(
                format!("{path}.beta"),
                "is a hyperparameter of the method dpo alone",
            ));
        }
        Ok(Self {
            method,
            n_epochs: whole("n_epochs", asked.n_epochs, EPOCHS)?,
            batch_size: whole("batch_size", asked.batch_size, BATCH)?,
            learning_rate_multiplier: above_zero(
                "learning_rate_multiplier",
                asked.learning_rate_multiplier,
                MULTIPLIER,
            )?,
            beta: above_zero("beta", asked.beta, BETA)?,
        })
    }

    /// The numbers for so many examples; see the table of this module.
    pub fn choose(&self, examples: usize) -> Chosen {
        let examples = examples.max(1) as u64;
        Chosen {
            n_epochs: self.n_epochs.or(|| auto_epochs(examples)),
            batch_size: self.batch_size.or(|| auto_batch(examples)),
            learning_rate_multiplier: self.learning_rate_multiplier.or(|| 1.0),
            beta: self.beta.or(|| DpoOptions::default().beta),
        }
    }

    /// The same, as chosen.
    pub fn chosen(self, chosen: Chosen) -> Self {
        let Chosen { n_epochs, batch_size, learning_rate_multiplier, beta } = chosen;
        Self {
            method: self.method,
            n_epochs: Auto::Is(n_epochs),
            batch_size: Auto::Is(batch_size),
            learning_rate_multiplier: Auto::Is(learning_rate_multiplier),
            beta: Auto::Is(beta),
        }
    }

    /// Those that every method has, as OpenAI shows them.
    pub fn object(&self) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("n_epochs".into(), json!(self.n_epochs));
        object.insert("batch_size".into(), json!(self.batch_size));
        object.insert("learning_rate_multiplier".into(), json!(self.learning_rate_multiplier));
        object
    }

    /// The method with all of its own, as OpenAI shows it.
    pub fn method_object(&self) -> Value {
        let mut hyperparameters = self.object();
        if self.method == Method::Dpo {
            hyperparameters.insert("beta".into(), json!(self.beta));
        }
        let name = self.method.name();
        json!({"type": name, name: {"hyperparameters": hyperparameters}})
    }
}

fn auto_epochs(examples: u64) -> u32 {
    let seen = examples * USUAL_EPOCHS;
    let epochs = if seen < *SEEN.start() {
        (SEEN.start() / examples).min(MOST_AUTO_EPOCHS)
    } else if seen > *SEEN.end() {
        (SEEN.end() / examples).max(1)
    } else {
        USUAL_EPOCHS
    };
    epochs as u32
}

fn auto_batch(examples: u64) -> u32 {
    let least = BatchOptions::default().batch_size as u64;
    ((examples + 250) / 500).clamp(least, MOST_AUTO_BATCH).min(examples) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(text: &str) -> Asked {
        serde_json::from_str(text).expect(text)
    }

    #[test]
    fn auto_follows_the_rules() {
        let auto = Hyperparameters::new(Method::Supervised, Asked::default(), "hyperparameters");
        let auto = auto.unwrap();
        for (examples, epochs, batch) in [
            (0, 25, 1),
            (1, 25, 1),
            (3, 25, 3),
            (10, 10, 4),
            (33, 3, 4),
            (34, 3, 4),
            (417, 3, 4),
            (5_000, 3, 10),
            (8_333, 3, 17),
            (8_334, 2, 17),
            (20_000, 1, 32),
            (10_000_000, 1, 32),
        ] {
            let chosen = auto.choose(examples);
            assert_eq!((chosen.n_epochs, chosen.batch_size), (epochs, batch), "{examples}");
            assert_eq!((chosen.learning_rate_multiplier, chosen.beta), (1.0, 0.1));
        }
    }

    #[test]
    fn numbers_stay_and_wrong_ones_are_named() {
        let all = asked(
            r#"{"n_epochs": 2, "batch_size": "auto", "learning_rate_multiplier": 3, "beta": 0.5}"#,
        );
        let made = Hyperparameters::new(Method::Dpo, all, "method.dpo.hyperparameters").unwrap();
        let chosen = made.choose(1);
        assert_eq!((chosen.n_epochs, chosen.learning_rate_multiplier), (2, 3.0));
        assert_eq!(
            made.chosen(chosen).method_object().to_string(),
            r#"{"type":"dpo","dpo":{"hyperparameters":{"n_epochs":2,"batch_size":1,"learning_rate_multiplier":3.0,"beta":0.5}}}"#
        );
        let kept: Hyperparameters = serde_json::from_value(json!(made)).unwrap();
        assert_eq!(kept, made);
        for (text, param) in [
            (r#"{"n_epochs": 0}"#, "p.n_epochs"),
            (r#"{"n_epochs": 51}"#, "p.n_epochs"),
            (r#"{"batch_size": 257}"#, "p.batch_size"),
            (r#"{"learning_rate_multiplier": 0}"#, "p.learning_rate_multiplier"),
            (r#"{"learning_rate_multiplier": -1.5}"#, "p.learning_rate_multiplier"),
            (r#"{"beta": 2.5}"#, "p.beta"),
        ] {
            let error = Hyperparameters::new(Method::Dpo, asked(text), "p").unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{text}");
        }
        let beta = Hyperparameters::new(Method::Supervised, asked(r#"{"beta": 1}"#), "p");
        assert!(beta.unwrap_err().message.contains("dpo alone"));
        for text in [
            r#"{"n_epochs": 1.5}"#,
            r#"{"n_epochs": -1}"#,
            r#"{"n_epochs": "many"}"#,
            r#"{"batch_size": 1e300}"#,
            r#"{"compute_multiplier": 1}"#,
            r#"{"n_epochs": [1]}"#,
        ] {
            assert!(serde_json::from_str::<Asked>(text).is_err(), "{text}");
        }
    }
}
