//! What LoRA trains: rank, scale, and which linear layers (Hu et al., 2021, arXiv:2106.09685;
//! rank-stabilised scale: Kalajdzievski, 2023, arXiv:2312.03732).

use crate::model::Model;
use crate::model::formats::experts::is_of_all;
use crate::{Error, Result, bounds};
use indexmap::IndexMap;
use regex::Regex;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Which linear layers get an adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Targets {
    /// Names: a layer whose path is one of them or ends in `.name`.
    Names(Vec<String>),
    /// `all-linear`, or a regular expression that has to match the whole path.
    Pattern(String),
}

impl Targets {
    /// Every linear layer of the decoder, not the head.
    pub const ALL_LINEAR: &str = "all-linear";

    /// Every linear layer of the decoder, not the head.
    pub fn all_linear() -> Self {
        Self::Pattern(Self::ALL_LINEAR.into())
    }
}

/// Tokens of whose rows alone are trained: PEFT's `trainable_token_indices`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TokenIndices {
    /// Rows of the embedding, and of the head where both are one weight.
    Embedding(Vec<u32>),
    /// Rows of the embedding (`embed_tokens`) or of the head (`lm_head`).
    Modules(IndexMap<String, Vec<u32>>),
}

impl TokenIndices {
    /// The name of the option.
    pub const KEY: &str = "trainable_token_indices";

    /// The tokens of each module, which [`Model::EMBEDDING`](crate::model::Model::EMBEDDING) or
    /// [`Model::HEAD`](crate::model::Model::HEAD) is the path of.
    ///
    /// # Errors
    /// For other modules, a module or a token that is named twice, and no tokens.
    pub fn by_path(&self) -> Result<IndexMap<&'static str, &[u32]>> {
        let modules = match self {
            Self::Embedding(tokens) => vec![("embed_tokens", tokens)],
            Self::Modules(modules) => {
                modules.iter().map(|(name, tokens)| (name.as_str(), tokens)).collect()
            }
        };
        let wrong = |problem: String| Error::option(Self::KEY, problem);
        let mut found = IndexMap::new();
        for (name, tokens) in modules {
            let path = [Model::EMBEDDING, Model::HEAD].into_iter().find(|path| ends_in(path, name));
            let path = path.ok_or_else(|| {
                wrong(format!("has `{}`, expected embed_tokens or lm_head", crate::readable(name)))
            })?;
            let mut sorted = tokens.clone();
            sorted.sort_unstable();
            if let Some(twice) = sorted.windows(2).find(|two| two[0] == two[1]) {
                return Err(wrong(format!("names token {} twice", twice[0])));
            }
            if tokens.is_empty() {
                return Err(wrong(format!("has no tokens of `{name}`")));
            }
            if found.insert(path, tokens.as_slice()).is_some() {
                return Err(wrong(format!("has `{path}` twice")));
            }
        }
        Ok(found)
    }
}

impl std::fmt::Display for TokenIndices {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let modules = match self {
            Self::Embedding(tokens) => vec![("embed_tokens", tokens.len())],
            Self::Modules(modules) => {
                modules.iter().map(|(name, tokens)| (name.as_str(), tokens.len())).collect()
            }
        };
        let rows: Vec<String> =
            modules.into_iter().map(|(name, count)| format!("{count} rows of {name}")).collect();
        formatter.write_str(&rows.join(", "))
    }
}

/// The configuration of a LoRA adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraConfig {
    /// The rank r of the update.
    pub rank: usize,
    /// The update is multiplied by alpha / r.
    pub alpha: f64,
    /// The probability with which an input of the low-rank path is dropped in training.
    pub dropout: f32,
    /// Multiply by alpha / sqrt(r) instead.
    pub rslora: bool,
    /// Which layers are adapted.
    pub targets: Targets,
    /// Layers that are left out although `targets` names them.
    pub exclude: Option<Targets>,
    /// Only these layers of the decoder, counted from 0.
    pub layers: Option<Vec<usize>>,
    /// Only the last n layers of the decoder.
    pub last_layers: Option<usize>,
    /// Other ranks for layers whose path matches (`(.*\.)?(key)$`); of several keys the first.
    pub rank_pattern: IndexMap<String, usize>,
    /// Other alphas, likewise.
    pub alpha_pattern: IndexMap<String, f64>,
    /// Train the length of each row of a weight apart from its direction (DoRA).
    pub dora: bool,
    /// Where A and B start.
    pub start: StartFrom,
    /// What EVA is told, where they start so.
    pub eva: EvaConfig,
    /// The ranks that EVA has found, by path, where 0 is no adapter; the layers that aren't among them have those they
    /// were told.
    pub layer_ranks: Option<IndexMap<String, usize>>,
    /// Which biases are trained too.
    pub bias: Biases,
    /// Other parts of the model of which all weights are trained, by name: `lm_head`, `embed_tokens`, `norm`.
    pub modules_to_save: Vec<String>,
    /// Tokens of whose rows in the embedding or the head alone are trained.
    pub trainable_token_indices: Option<TokenIndices>,
}

/// Where a new adapter starts: PEFT's `init_lora_weights`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StartFrom {
    /// A uniform in ±1/√in, B zero.
    #[default]
    Kaiming,
    /// A normal with a deviation of 1 / rank, B zero.
    Gaussian,
    /// The weight's largest singular values, as exactly as f32 has them (PiSSA).
    Pissa,
    /// Their approximation by so many iterations.
    PissaIterations(usize),
    /// The weight's QR factors (OLoRA).
    Olora,
    /// A the directions in which the layer's inputs vary most over the training data, B zero (EVA).
    Eva,
}

impl StartFrom {
    /// All words for it, in a sentence.
    pub const WORDS: &str =
        "kaiming, gaussian, pissa, pissa_niter_N with N up to 1000, olora or eva";

    /// PEFT's word for it, which its files and this program's settings have.
    pub fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "kaiming" | "true" => Self::Kaiming,
            "gaussian" => Self::Gaussian,
            "pissa" => Self::Pissa,
            "olora" => Self::Olora,
            "eva" => Self::Eva,
            _ => match word.strip_prefix("pissa_niter_")?.parse() {
                Ok(iterations @ 1..=1000) => Self::PissaIterations(iterations),
                _ => return None,
            },
        })
    }

    /// Whether A·B isn't zero at the start.
    pub fn takes_from_weight(self) -> bool {
        matches!(self, Self::Pissa | Self::PissaIterations(_) | Self::Olora)
    }
}

impl Serialize for StartFrom {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for StartFrom {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// PEFT's files say `true` where nothing special is meant.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Switch(bool),
            Word(String),
        }
        let word = match Written::deserialize(deserializer)? {
            Written::Switch(on) => on.to_string(),
            Written::Word(word) => word,
        };
        word.parse().map_err(serde::de::Error::custom)
    }
}

impl std::str::FromStr for StartFrom {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        Self::parse(word)
            .ok_or_else(|| format!("is {}, expected {}", crate::readable(word), Self::WORDS))
    }
}

impl std::fmt::Display for StartFrom {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Kaiming => formatter.write_str("kaiming"),
            Self::Gaussian => formatter.write_str("gaussian"),
            Self::Pissa => formatter.write_str("pissa"),
            Self::PissaIterations(count) => write!(formatter, "pissa_niter_{count}"),
            Self::Olora => formatter.write_str("olora"),
            Self::Eva => formatter.write_str("eva"),
        }
    }
}

/// What [`StartFrom::Eva`] is told, by the names of PEFT's `EvaConfig`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvaConfig {
    /// A layer's rank may become this many times what it was told, while their sum stays; 1 leaves them as
    /// they are. Of layers that read the same input the highest rank counts, as in PEFT.
    pub rho: f64,
    /// A direction has been found when the next batch leaves this much of it, as the cosine of both.
    pub tau: f64,
    /// Divide each direction by the square root of its singular value.
    pub whiten: bool,
    /// Where a rank changes, multiply alpha by as much.
    pub adjust_scaling_factors: bool,
}

impl Default for EvaConfig {
    fn default() -> Self {
        Self { rho: 2.0, tau: 0.99, whiten: false, adjust_scaling_factors: true }
    }
}

impl EvaConfig {
    fn validate(&self) -> Result<()> {
        let Self { rho, tau, .. } = *self;
        if !(1.0..=bounds::RATIO).contains(&rho) {
            return Err(Error::option(
                "eva_rho",
                format!("is {rho}, expected at least 1 and at most {}", bounds::RATIO),
            ));
        }
        if !(tau > 0.0 && tau < 1.0) {
            return Err(Error::option(
                "eva_tau",
                format!("is {tau}, expected above 0 and below 1"),
            ));
        }
        Ok(())
    }
}

/// Which biases of linear layers are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Biases {
    /// None.
    #[default]
    None,
    /// Those of layers with an adapter.
    LoraOnly,
    /// Those of all layers.
    All,
}

impl Biases {
    /// All words for it, in a sentence.
    pub const WORDS: &str = "none, lora_only or all";
}

impl std::str::FromStr for Biases {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "none" => Ok(Self::None),
            "lora_only" => Ok(Self::LoraOnly),
            "all" => Ok(Self::All),
            _ => Err(format!("is {}, expected {}", crate::readable(word), Self::WORDS)),
        }
    }
}

impl Default for LoraConfig {
    fn default() -> Self {
        let rank = 16;
        Self {
            rank,
            alpha: Self::default_alpha(rank),
            dropout: 0.0,
            rslora: false,
            targets: Targets::all_linear(),
            exclude: None,
            layers: None,
            last_layers: None,
            rank_pattern: IndexMap::new(),
            alpha_pattern: IndexMap::new(),
            dora: false,
            start: StartFrom::default(),
            eva: EvaConfig::default(),
            layer_ranks: None,
            bias: Biases::default(),
            modules_to_save: Vec::new(),
            trainable_token_indices: None,
        }
    }
}

/// The adapter of one linear layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// The path of the layer in the model, such as `model.layers.0.self_attn.q_proj`.
    pub path: String,
    /// Its rank.
    pub rank: usize,
    /// What its low-rank path is multiplied by.
    pub scale: f64,
}

/// The rank and the alpha that a configuration has for a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Told {
    rank: usize,
    alpha: f64,
}

impl LoraConfig {
    /// The alpha of a rank unless told otherwise: twice the rank.
    pub fn default_alpha(rank: usize) -> f64 {
        2.0 * rank as f64
    }

    /// Checks every value that does not depend on the model.
    pub fn validate(&self) -> Result<()> {
        bounds::check("rank", self.rank, &bounds::RANK)?;
        for (key, &rank) in &self.rank_pattern {
            bounds::check(&format!("rank_pattern.{key}"), rank, &bounds::RANK)?;
        }
        bounds::positive("alpha", self.alpha, bounds::ALPHA)?;
        for (key, &alpha) in &self.alpha_pattern {
            bounds::positive(&format!("alpha_pattern.{key}"), alpha, bounds::ALPHA)?;
        }
        bounds::share("dropout", self.dropout)?;
        self.eva.validate()?;
        for (path, rank) in self.layer_ranks.iter().flatten() {
            bounds::check(&format!("layer_ranks.{path}"), *rank, &(0..=*bounds::RANK.end()))?;
        }
        if let Some(tokens) = &self.trainable_token_indices {
            tokens.by_path()?;
        }
        if self.layers.is_some() && self.last_layers.is_some() {
            return Err(Error::option(
                "layers",
                "and the last n layers were both given, expected one of them",
            ));
        }
        if self.last_layers == Some(0) || self.layers.as_ref().is_some_and(Vec::is_empty) {
            return Err(Error::option("layers", "selects no layer"));
        }
        Ok(())
    }

    /// Whether the embedding or the head gets an adapter or is trained whole.
    pub(super) fn adapts_tables(&self) -> Result<bool> {
        let targets = Matcher::new("target_modules", &self.targets)?;
        Ok([Model::EMBEDDING, Model::HEAD].iter().any(|path| {
            targets.matches(path)
                || self.modules_to_save.iter().any(|module| path.ends_with(module.as_str()))
        }))
    }

    /// The decoder layers that may be adapted, of a model with `count` of them.
    pub fn selected_layers(&self, count: usize) -> Result<Option<Vec<usize>>> {
        if let Some(layers) = &self.layers {
            if let Some(layer) = layers.iter().find(|&&layer| layer >= count) {
                return Err(Error::option(
                    "layers",
                    format!(
                        "names layer {layer}, but the model has layers 0 to {}",
                        count.saturating_sub(1)
                    ),
                ));
            }
            return Ok(Some(layers.clone()));
        }
        // More than there are means all, as in mlx-lm.
        Ok(self
            .last_layers
            .filter(|&last| last < count)
            .map(|last| (count - last..count).collect()))
    }

    /// An error for a target that is a part of the model's experts, which are frozen under an adapter.
    ///
    /// # Errors
    /// [`Error::Option`] that names the target and what the model has besides.
    pub fn refuse_experts(&self, model: &Model) -> Result<()> {
        let Some(experts) = &model.config().experts else { return Ok(()) };
        let is_one = |name: &&str| {
            let last = name.rsplit('.').next().unwrap_or(name);
            last == "experts"
                || last == experts.names.router
                || experts.names.projections.contains(&last)
                || is_of_all(experts, last)
        };
        let paths = model.target_paths();
        match self.unknown_targets(&paths).find(is_one) {
            None => Ok(()),
            Some(name) => Err(Error::option(
                "target_modules",
                format!(
                    "`{name}` is a part of this model's experts, which have no adapters here; it has {} besides",
                    layer_names(&paths)
                ),
            )),
        }
    }

    /// Decides for each of the model's linear layers and its embedding, given by path in a model of
    /// `layer_count` decoder layers, whether and how it is adapted.
    pub fn resolve(&self, paths: &[String], layer_count: usize) -> Result<Vec<Resolved>> {
        self.validate()?;
        let layers = self.selected_layers(layer_count)?;
        let targets = Matcher::new("target_modules", &self.targets)?;
        let exclude = self
            .exclude
            .as_ref()
            .map(|exclude| Matcher::new("exclude_modules", exclude))
            .transpose()?;
        let told = self.told_by_path()?;
        if let Some(name) = self.unknown_targets(paths).next() {
            return Err(Error::option(
                "target_modules",
                format!(
                    "`{name}` is not a linear layer of this model; it has {}",
                    layer_names(paths)
                ),
            ));
        }
        // As in PEFT, a module that is named by its whole path may be in any layer or, such as the head, in none.
        let is_named = |path: &String| match &self.targets {
            Targets::Names(names) => names.contains(path),
            _ => false,
        };
        let mut resolved = Vec::new();
        for path in paths {
            let selected = targets.matches(path)
                && !exclude.as_ref().is_some_and(|exclude| exclude.matches(path))
                && layers.as_ref().is_none_or(|layers| {
                    is_named(path) || layer_index(path).is_some_and(|index| layers.contains(&index))
                });
            if selected {
                let Told { rank, alpha } = self.found(path, told(path));
                if rank == 0 {
                    continue;
                }
                let divisor = if self.rslora { (rank as f64).sqrt() } else { rank as f64 };
                resolved.push(Resolved { path: path.clone(), rank, scale: alpha / divisor });
            }
        }
        if resolved.is_empty() {
            return Err(Error::option(
                "target_modules",
                format!(
                    "{} matches no linear layer of this model; it has {}",
                    serde_json::to_string(&self.targets).unwrap_or_default(),
                    layer_names(paths)
                ),
            ));
        }
        Ok(resolved)
    }

    /// The names among its targets that none of these paths has.
    pub(super) fn unknown_targets<'a>(
        &'a self,
        paths: &'a [String],
    ) -> impl Iterator<Item = &'a str> {
        let names = match &self.targets {
            Targets::Names(names) => names.as_slice(),
            Targets::Pattern(_) => &[],
        };
        let is_known = |name: &str| paths.iter().any(|path| ends_in(path, name));
        names.iter().map(String::as_str).filter(move |name| !is_known(name))
    }

    /// Has these layers adapted and no others.
    pub(super) fn choose(&mut self, paths: Vec<String>) {
        self.targets = Targets::Names(paths);
        (self.exclude, self.layers, self.last_layers) = (None, None, None);
    }

    /// The rank and the alpha of a path by the patterns.
    fn told_by_path(&self) -> Result<impl Fn(&str) -> Told> {
        let ranks = compile_patterns("rank_pattern", &self.rank_pattern)?;
        let alphas = compile_patterns("alpha_pattern", &self.alpha_pattern)?;
        let (rank, alpha) = (self.rank, self.alpha);
        Ok(move |path: &str| Told {
            rank: first_match(&ranks, path).unwrap_or(rank),
            alpha: first_match(&alphas, path).unwrap_or(alpha),
        })
    }

    /// What became of what a layer was told, if EVA has found another rank for it.
    fn found(&self, path: &str, told: Told) -> Told {
        match self.layer_ranks.as_ref().and_then(|found| found.get(path)) {
            Some(&rank) if rank != told.rank => {
                let factor = match self.eva.adjust_scaling_factors {
                    true => rank as f64 / told.rank as f64,
                    false => 1.0,
                };
                Told { rank, alpha: told.alpha * factor }
            }
            _ => told,
        }
    }

    /// The same layers, ranks and scales without [`Self::layer_ranks`]: the found ranks as patterns of whole paths, as
    /// PEFT writes them. `adapted` are the paths that have an adapter.
    pub(super) fn with_found_as_patterns<'p>(
        &self,
        adapted: impl Iterator<Item = &'p str>,
    ) -> Result<Self> {
        let Some(found) = &self.layer_ranks else { return Ok(self.clone()) };
        let told = self.told_by_path()?;
        let mut plain = Self { layer_ranks: None, ..self.clone() };
        (plain.rank_pattern, plain.alpha_pattern) = (IndexMap::new(), IndexMap::new());
        for path in found.keys() {
            let Told { rank, alpha } = self.found(path, told(path));
            // Where a pattern of the user's says something else, the path has to come before it.
            if rank > 0 && (rank != self.rank || rank != told(path).rank) {
                plain.rank_pattern.insert(path.clone(), rank);
            }
            if rank > 0 && (alpha != self.alpha || alpha != told(path).alpha) {
                plain.alpha_pattern.insert(path.clone(), alpha);
            }
        }
        for (key, rank) in &self.rank_pattern {
            plain.rank_pattern.entry(key.clone()).or_insert(*rank);
        }
        for (key, alpha) in &self.alpha_pattern {
            plain.alpha_pattern.entry(key.clone()).or_insert(*alpha);
        }
        if found.values().any(|rank| *rank == 0) {
            plain.choose(adapted.map(String::from).collect());
        }
        Ok(plain)
    }
}

/// The decoder layer a path belongs to: the first number in it.
fn layer_index(path: &str) -> Option<usize> {
    path.split('.').find_map(|part| part.parse().ok())
}

pub(super) fn ends_in(path: &str, name: &str) -> bool {
    path == name || path.strip_suffix(name).is_some_and(|rest| rest.ends_with('.'))
}

/// The distinct last parts of the paths, for messages.
pub(super) fn layer_names(paths: &[String]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for path in paths {
        let name = path.rsplit('.').next().unwrap_or(path);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(", ")
}

enum Matcher {
    All,
    Names(Vec<String>),
    Pattern(Regex),
}

impl Matcher {
    fn new(option: &str, targets: &Targets) -> Result<Self> {
        Ok(match targets {
            Targets::Names(names) => Self::Names(names.clone()),
            Targets::Pattern(pattern) if pattern == Targets::ALL_LINEAR => Self::All,
            Targets::Pattern(pattern) => {
                Self::Pattern(compile(option, &format!("^(?:{pattern})$"))?)
            }
        })
    }

    fn matches(&self, path: &str) -> bool {
        match self {
            // As in PEFT, without the embedding and the head.
            Self::All => layer_index(path).is_some(),
            Self::Names(names) => names.iter().any(|name| ends_in(path, name)),
            Self::Pattern(pattern) => pattern.is_match(path),
        }
    }
}

fn compile(option: &str, pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| {
        Error::option(option, format!("is not a regular expression this program reads: {error}"))
    })
}

fn compile_patterns<T: Copy>(
    option: &str,
    patterns: &IndexMap<String, T>,
) -> Result<Vec<(Regex, T)>> {
    patterns
        .iter()
        .map(|(key, value)| Ok((compile(option, &format!(r"^(?:.*\.)?(?:{key})$"))?, *value)))
        .collect()
}

fn first_match<T: Copy>(patterns: &[(Regex, T)], path: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(path)).map(|(_, value)| *value)
}
