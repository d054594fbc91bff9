//! The fields of a request that say how its texts are drawn, and what they mean for the engine.
//!
//! What a request leaves out is as the server was started with, which is what the model's `generation_config.json` says:
//! OpenAI's temperature of 1 stands only where neither says anything.

use crate::app::App;
use crate::error::{ApiError, Result};
use metal_candle::generate::GenerateOptions;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Texts of one request for each prompt, at most.
const MOST_CHOICES: usize = 128;
/// Stop strings, at most, and the characters of one.
const MOST_STOPS: usize = 16;
const LONGEST_STOP: usize = 256;
/// Entries of `logit_bias`, at most.
const MOST_BIASES: usize = 4096;
/// The most alternatives that are told beside a token.
pub const MOST_ALTERNATIVES: usize = 20;
/// The pairs of `metadata`, the characters of a name and of a value, at most.
const METADATA: (usize, usize, usize) = (16, 64, 512);

/// How the texts of a request are drawn, as the request has it.
#[derive(Debug, Clone, Default)]
pub struct Sampling {
    /// 0 to 2.
    pub temperature: Option<f64>,
    /// Above 0, at most 1.
    pub top_p: Option<f64>,
    /// 0 or -1 is off.
    pub top_k: Option<i64>,
    /// 0 to 1.
    pub min_p: Option<f64>,
    /// 0.001 to 1000.
    pub repetition_penalty: Option<f64>,
    /// -2 to 2.
    pub presence_penalty: Option<f64>,
    /// -2 to 2.
    pub frequency_penalty: Option<f64>,
    /// By token id, -100 to 100.
    pub logit_bias: Option<BTreeMap<String, f64>>,
    /// The first choice's; each next one has one more.
    pub seed: Option<i64>,
    /// A string or a list of them.
    pub stop: Option<Value>,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: Option<bool>,
    /// Choices of each prompt.
    pub n: Option<usize>,
}

/// Declares a request to write texts: its own fields and those that all such requests share.
macro_rules! request {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_meta])* $field: $type,)*
            model: String,
            temperature: Option<f64>,
            top_p: Option<f64>,
            top_k: Option<i64>,
            min_p: Option<f64>,
            repetition_penalty: Option<f64>,
            presence_penalty: Option<f64>,
            frequency_penalty: Option<f64>,
            logit_bias: Option<std::collections::BTreeMap<String, f64>>,
            seed: Option<i64>,
            stop: Option<serde_json::Value>,
            ignore_eos: Option<bool>,
            n: Option<usize>,
            stream: Option<bool>,
            stream_options: Option<crate::sampling::StreamOptions>,
            /// Who asks, which changes nothing.
            #[serde(rename = "user")]
            _user: Option<String>,
            guided_json: Option<serde_json::Value>,
            guided_regex: Option<String>,
            guided_choice: Option<Vec<String>>,
            guided_grammar: Option<String>,
        }

        impl $name {
            fn sampling(&mut self) -> crate::sampling::Sampling {
                crate::sampling::Sampling {
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    repetition_penalty: self.repetition_penalty,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    logit_bias: self.logit_bias.take(),
                    seed: self.seed,
                    stop: self.stop.take(),
                    ignore_eos: self.ignore_eos,
                    n: self.n,
                }
            }

            fn guided(&mut self) -> crate::error::Result<crate::constraint::Constraint> {
                crate::constraint::Constraint::guided(
                    self.guided_json.take(),
                    self.guided_regex.take(),
                    self.guided_choice.take(),
                    self.guided_grammar.take(),
                )
            }

            /// Whether the answer is a stream, and where that tells what was used.
            fn streaming(&self) -> crate::error::Result<Option<crate::sampling::UsageIn>> {
                crate::sampling::streaming(self.stream, self.stream_options.as_ref())
            }
        }
    };
}
pub(crate) use request;

/// What a stream has beside its text.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    include_usage: Option<bool>,
    /// vLLM's.
    continuous_usage_stats: Option<bool>,
    /// Asks for padding to be left out, and there is none.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

/// Where a stream tells what was used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum UsageIn {
    /// Nowhere.
    None,
    /// In a last chunk of its own.
    Last,
    /// There, and in each chunk what its choice has used so far.
    Each,
}

/// Whether the answer is a stream, and where that tells what was used.
///
/// # Errors
/// When there are options for a stream, and none is asked for.
pub fn streaming(stream: Option<bool>, options: Option<&StreamOptions>) -> Result<Option<UsageIn>> {
    match (stream.unwrap_or(false), options) {
        (false, Some(_)) => Err(ApiError::field("stream_options", "needs \"stream\": true")),
        (false, None) => Ok(None),
        (true, None) => Ok(Some(UsageIn::None)),
        (true, Some(options)) => {
            let each = options.continuous_usage_stats.unwrap_or(false);
            Ok(Some(match options.include_usage.unwrap_or(false) {
                false => UsageIn::None,
                true if each => UsageIn::Each,
                true => UsageIn::Last,
            }))
        }
    }
}

impl Sampling {
    /// What the engine is told for each choice of a prompt: the same but for the seed. `max_tokens` is still the
    /// default.
    ///
    /// # Errors
    /// A 400 that names the first field that cannot be meant.
    pub fn options(&self, app: &App) -> Result<Vec<GenerateOptions>> {
        self.over(&app.defaults, app.model.config().vocab_size)
    }

    fn over(&self, defaults: &GenerateOptions, vocabulary: usize) -> Result<Vec<GenerateOptions>> {
        let mut options = defaults.clone();
        let sampling = &mut options.sampling;
        if let Some(temperature) = self.temperature {
            within("temperature", temperature, 0.0, 2.0)?;
            sampling.temperature = temperature;
        }
        if let Some(k) = self.top_k {
            let most = i64::try_from(vocabulary).unwrap_or(i64::MAX);
            if !(-1..=most).contains(&k) {
                let what = format!("is {k}, expected -1 or 0 (off) to {most}");
                return Err(ApiError::field("top_k", what));
            }
            sampling.top_k = usize::try_from(k).unwrap_or(0);
        }
        for (given, place) in [
            (self.top_p, &mut sampling.top_p),
            (self.min_p, &mut sampling.min_p),
            (self.repetition_penalty, &mut sampling.repetition_penalty),
            (self.presence_penalty, &mut sampling.presence_penalty),
            (self.frequency_penalty, &mut sampling.frequency_penalty),
        ] {
            *place = given.unwrap_or(*place);
        }
        if let Some(biases) = &self.logit_bias {
            sampling.logit_bias = logit_bias(biases, vocabulary)?;
        }
        if let Some(stop) = &self.stop {
            options.stop = stops("stop", stop)?;
        }
        options.ignore_eos = self.ignore_eos.unwrap_or(options.ignore_eos);
        options.validate()?;
        let choices = self.n.unwrap_or(1);
        if !(1..=MOST_CHOICES).contains(&choices) {
            let what = format!("is {choices}, expected 1 to {MOST_CHOICES}");
            return Err(ApiError::field("n", what));
        }
        let first = match self.seed {
            Some(seed) => seed.cast_unsigned(),
            None => random_seed(),
        };
        let choice = |index: usize| {
            let mut options = options.clone();
            options.sampling.seed = first.wrapping_add(index as u64);
            options
        };
        Ok((0..choices).map(choice).collect())
    }

    /// The options of each choice of one of several prompts, by those of the first. Without a seed no two choices have
    /// the same random numbers: the same prompt again gives other texts. With one, a prompt's texts don't depend on its
    /// place.
    pub fn of_prompt(&self, first: &[GenerateOptions], prompt: usize) -> Vec<GenerateOptions> {
        let choices_before = match self.seed {
            Some(_) => 0,
            None => prompt * first.len(),
        };
        let mut options = first.to_vec();
        for GenerateOptions { sampling, .. } in &mut options {
            sampling.seed = sampling.seed.wrapping_add(choices_before as u64);
        }
        options
    }
}

fn random_seed() -> u64 {
    let mut bytes = [0; 8];
    // The system's source of random numbers fails on no system that this runs on.
    getrandom::fill(&mut bytes).expect("random numbers");
    u64::from_le_bytes(bytes)
}

/// That a number of a request is from `least` to `most`.
pub fn within(field: &str, value: f64, least: f64, most: f64) -> Result<()> {
    match (least..=most).contains(&value) {
        true => Ok(()),
        false => Err(ApiError::field(field, format!("is {value}, expected {least} to {most}"))),
    }
}

fn logit_bias(biases: &BTreeMap<String, f64>, vocabulary: usize) -> Result<BTreeMap<u32, f32>> {
    if biases.len() > MOST_BIASES {
        let what = format!("has {} entries, expected at most {MOST_BIASES}", biases.len());
        return Err(ApiError::field("logit_bias", what));
    }
    let entry = |(key, bias): (&String, &f64)| {
        let token = key.parse::<u32>().ok().filter(|token| (*token as usize) < vocabulary);
        let Some(token) = token else {
            let found = metal_candle::readable(key);
            let what = format!("has the key {found:?}, expected token ids below {vocabulary}");
            return Err(ApiError::field("logit_bias", what));
        };
        within(&format!("logit_bias.{token}"), *bias, -100.0, 100.0)?;
        Ok((token, *bias as f32))
    };
    biases.iter().map(entry).collect()
}

/// Stop strings: one, or a list of them.
///
/// # Errors
/// A 400 that names `field`.
pub fn stops(field: &str, stop: &Value) -> Result<Vec<String>> {
    let wrong = |what: String| ApiError::field(field, what);
    let given = match stop {
        Value::Array(stops) => stops.as_slice(),
        one => std::slice::from_ref(one),
    };
    if given.len() > MOST_STOPS {
        let found = given.len();
        return Err(wrong(format!("has {found} texts, expected at most {MOST_STOPS}")));
    }
    let text = |stop: &Value| {
        let stop = stop.as_str().ok_or_else(|| wrong("expected a string or strings".into()))?;
        match stop.chars().count() {
            0 => Err(wrong("has an empty text, which would end every text at once".into())),
            length if length > LONGEST_STOP => Err(wrong(format!(
                "has a text of {length} characters, expected at most {LONGEST_STOP}"
            ))),
            _ => Ok(stop.to_string()),
        }
    };
    given.iter().map(text).collect()
}

/// How many alternatives are told beside a token.
///
/// # Errors
/// A 400 that names `field` for more than there can be.
pub fn alternatives(field: &str, count: usize) -> Result<usize> {
    match count <= MOST_ALTERNATIVES {
        true => Ok(count),
        false => {
            let what = format!("is {count}, expected 0 to {MOST_ALTERNATIVES}");
            Err(ApiError::field(field, what))
        }
    }
}

/// That a request's `metadata`, which is kept nowhere, is what OpenAI's may be.
///
/// # Errors
/// A 400 that names it.
pub fn check_metadata(metadata: Option<&Map<String, Value>>) -> Result<()> {
    let (most, name, value) = METADATA;
    let pairs = metadata.into_iter().flatten();
    let fits = |(key, text): (&String, &Value)| {
        let text = text.as_str();
        key.chars().count() <= name && text.is_some_and(|text| text.chars().count() <= value)
    };
    if metadata.is_some_and(|pairs| pairs.len() > most) || !pairs.into_iter().all(fits) {
        let what =
            format!("expected at most {most} strings of {value} characters under names of {name}");
        return Err(ApiError::field("metadata", what));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeSet;

    fn options(sampling: &Sampling) -> Result<Vec<GenerateOptions>> {
        let mut defaults = GenerateOptions::default();
        defaults.sampling.temperature = 0.7;
        sampling.over(&defaults, 100)
    }

    fn refused(sampling: Sampling) -> String {
        options(&sampling).expect_err("refused").param.expect("a field")
    }

    #[test]
    fn what_a_request_leaves_out_is_the_models() {
        let drawn = options(&Sampling::default()).unwrap();
        assert_eq!(drawn.len(), 1);
        assert_eq!(drawn[0].sampling.temperature, 0.7);
        let greedy = Sampling { temperature: Some(0.0), top_k: Some(-1), ..Sampling::default() };
        let drawn = options(&greedy).unwrap();
        assert_eq!((drawn[0].sampling.temperature, drawn[0].sampling.top_k), (0.0, 0));
    }

    #[test]
    fn choices_differ_in_their_seed_alone() {
        let asked = Sampling { seed: Some(-1), n: Some(3), ..Sampling::default() };
        let drawn = options(&asked).unwrap();
        let seeds: Vec<u64> = drawn.iter().map(|it| it.sampling.seed).collect();
        assert_eq!(seeds, [u64::MAX, 0, 1]);
        let any = |_| options(&Sampling::default()).unwrap()[0].sampling.seed;
        assert_ne!(any(0), any(1));
    }

    #[test]
    fn choices_of_several_prompts_have_their_own_random_numbers_unless_there_is_a_seed() {
        let seeds = |seed| {
            let asked = Sampling { seed, n: Some(2), ..Sampling::default() };
            let first = options(&asked).unwrap();
            let all = (0..3).flat_map(|prompt| asked.of_prompt(&first, prompt));
            all.map(|it| it.sampling.seed).collect::<Vec<u64>>()
        };
        let any = seeds(None);
        assert_eq!(any.iter().collect::<BTreeSet<_>>().len(), 6, "{any:?}");
        assert_eq!(seeds(Some(7)), [7, 8, 7, 8, 7, 8]);
    }

    #[test]
    fn wrong_fields_are_named() {
        let field = |sampling| refused(sampling);
        let some = Sampling::default;
        assert_eq!(field(Sampling { temperature: Some(2.1), ..some() }), "temperature");
        assert_eq!(field(Sampling { temperature: Some(f64::NAN), ..some() }), "temperature");
        assert_eq!(field(Sampling { top_p: Some(0.0), ..some() }), "top_p");
        assert_eq!(field(Sampling { top_k: Some(101), ..some() }), "top_k");
        assert_eq!(field(Sampling { min_p: Some(1.5), ..some() }), "min_p");
        assert_eq!(field(Sampling { presence_penalty: Some(3.0), ..some() }), "presence_penalty");
        assert_eq!(field(Sampling { n: Some(0), ..some() }), "n");
        assert_eq!(field(Sampling { n: Some(129), ..some() }), "n");
        let bias = |key: &str, value| {
            let logit_bias = Some(BTreeMap::from([(key.to_string(), value)]));
            Sampling { logit_bias, ..some() }
        };
        assert_eq!(field(bias("100", 1.0)), "logit_bias");
        assert_eq!(field(bias("-1", 1.0)), "logit_bias");
        assert_eq!(field(bias("7", 101.0)), "logit_bias.7");
        assert_eq!(options(&bias("7", -100.0)).unwrap()[0].sampling.logit_bias[&7], -100.0);
        for wrong in
            [json!(""), json!([1]), json!(vec!["a"; 17]), json!({}), json!("a".repeat(257))]
        {
            assert_eq!(field(Sampling { stop: Some(wrong), ..some() }), "stop");
        }
        let stop = Some(json!(["a", "é".repeat(256)]));
        assert_eq!(options(&Sampling { stop, ..some() }).unwrap()[0].stop.len(), 2);
    }

    #[test]
    fn options_of_a_stream_need_one() {
        let options = |usage, each| StreamOptions {
            include_usage: usage,
            continuous_usage_stats: each,
            _include_obfuscation: None,
        };
        for (usage, each, told) in [
            (Some(true), None, UsageIn::Last),
            (Some(true), Some(true), UsageIn::Each),
            (None, Some(true), UsageIn::None),
        ] {
            let options = options(usage, each);
            assert_eq!(streaming(Some(true), Some(&options)).unwrap(), Some(told));
        }
        assert_eq!(streaming(Some(true), None).unwrap(), Some(UsageIn::None));
        assert_eq!(streaming(None, None).unwrap(), None);
        assert!(streaming(None, Some(&options(Some(true), None))).is_err());
    }
}
