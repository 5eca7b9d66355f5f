// The signs of LaTeX by their names.

const table = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split(":")));

export const LETTERS = table(`
  alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι
  kappa:κ lambda:λ mu:μ nu:ν xi:ξ omicron:ο pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ
  upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ
  Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω hbar:ℏ ell:ℓ Re:ℜ Im:ℑ wp:℘ aleph:ℵ beth:ℶ infty:∞ partial:∂
  nabla:∇ emptyset:∅ varnothing:∅ imath:ı jmath:ȷ angle:∠ degree:° top:⊤ bot:⊥ hslash:ℏ eth:ð
`);
export const SIGNS = table(`
  times:× div:÷ cdot:⋅ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ ominus:⊖ otimes:⊗ oslash:⊘
  odot:⊙ dagger:† ddagger:‡ amalg:⨿ cap:∩ cup:∪ uplus:⊎ sqcap:⊓ sqcup:⊔ vee:∨ lor:∨ wedge:∧ land:∧
  setminus:∖ wr:≀ neg:¬ lnot:¬ forall:∀ exists:∃ nexists:∄ in:∈ notin:∉ ni:∋ subset:⊂ supset:⊃
  subseteq:⊆ supseteq:⊇ subsetneq:⊊ supsetneq:⊋ sqsubseteq:⊑ leq:≤ le:≤ geq:≥ ge:≥ neq:≠ ne:≠ ll:≪
  gg:≫ leqslant:⩽ geqslant:⩾ lesssim:≲ gtrsim:≳ prec:≺ succ:≻ preceq:⪯ succeq:⪰ equiv:≡ sim:∼
  simeq:≃ approx:≈ cong:≅ propto:∝ asymp:≍ doteq:≐ models:⊨ vdash:⊢ dashv:⊣ Vdash:⊩ perp:⊥ mid:∣
  nmid:∤ parallel:∥ to:→ rightarrow:→ leftarrow:← gets:← leftrightarrow:↔ Rightarrow:⇒ implies:⟹
  Leftarrow:⇐ impliedby:⟸ Leftrightarrow:⇔ iff:⟺ longrightarrow:⟶ longleftarrow:⟵ mapsto:↦
  longmapsto:⟼ hookrightarrow:↪ hookleftarrow:↩ uparrow:↑ downarrow:↓ updownarrow:↕ Uparrow:⇑
  Downarrow:⇓ nearrow:↗ searrow:↘ swarrow:↙ nwarrow:↖ rightharpoonup:⇀ rightleftharpoons:⇌
  Longrightarrow:⟹ Longleftarrow:⟸ Longleftrightarrow:⟺ longleftrightarrow:⟷ leadsto:⇝
  ldots:… dots:… dotsc:… dotsb:⋯ cdots:⋯ vdots:⋮ ddots:⋱ prime:′ triangle:△ square:□ Box:□ Diamond:◇
  blacksquare:■ therefore:∴ because:∵ checkmark:✓ colon:: coloneqq:≔ triangleq:≜ lll:⋘ ggg:⋙
  bowtie:⋈ diamond:⋄ lhd:⊲ rhd:⊳ unlhd:⊴ unrhd:⊵ nleq:≰ ngeq:≱ nsubseteq:⊈ nsupseteq:⊉ complement:∁
  surd:√ flat:♭ natural:♮ sharp:♯ S:§ P:¶ pounds:£ yen:¥ euro:€ copyright:© %:% $:$ &:& #:# _:_
  clubsuit:♣ diamondsuit:♢ heartsuit:♡ spadesuit:♠ smallsetminus:∖ rightsquigarrow:⇝ vartriangle:△
`);
SIGNS.colon = ":";
SIGNS.bmod = SIGNS.mod = "mod";
export const BIG = table(`
  sum:∑ prod:∏ coprod:∐ int:∫ iint:∬ iiint:∭ oint:∮ bigcup:⋃ bigcap:⋂ bigvee:⋁ bigwedge:⋀ bigoplus:⨁
  bigotimes:⨂ bigodot:⨀ biguplus:⨄ bigsqcup:⨆
`);
// Names of functions. Those with words take what stands below them as limits.
export const FUNCTIONS = Object.fromEntries(
  ("arccos arcsin arctan arg cos cosh cot coth csc deg dim exp hom ker lg ln log sec sin sinh " +
   "tan tanh Tr tr rank").split(" ").map((name) => [name, ""]));
Object.assign(FUNCTIONS, {
  lim: "lim", max: "max", min: "min", sup: "sup", inf: "inf", det: "det", gcd: "gcd", Pr: "Pr",
  limsup: "lim sup", liminf: "lim inf", argmax: "arg max", argmin: "arg min",
});
export const SPACES = {
  ",": "0.17em", ":": "0.22em", ">": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.33em",
  "\n": "0.33em", quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.17em",
};
export const FENCES = {
  ...table(`
    {:{ }:} |:‖ lbrace:{ rbrace:} lbrack:[ rbrack:] langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈
    rceil:⌉
    vert:| lvert:| rvert:| Vert:‖ lVert:‖ rVert:‖ backslash:\\ uparrow:↑ downarrow:↓ lgroup:⟮
    rgroup:⟯
  `),
};
export const DELIMITERS = new Set("()[]|/.<>");
export const ACCENTS = table(`
  hat:^ widehat:^ check:ˇ tilde:~ widetilde:~ bar:‾ overline:‾ vec:→ overrightarrow:→
  overleftarrow:← dot:˙ ddot:¨ acute:´ grave:\` breve:˘ mathring:˚ underline:_ overbrace:⏞
  underbrace:⏟
`);
export const ARROWS = table(`
  xrightarrow:→ xleftarrow:← xRightarrow:⇒ xLeftarrow:⇐ xleftrightarrow:↔ xmapsto:↦
`);
// Commands that only change sizes and places.
export const UNSEEN = new Set(("displaystyle textstyle scriptstyle scriptscriptstyle nonumber " +
  "notag hline limits nolimits").split(" "));

// Letters of a style: the code points of its A, a and 0, and letters that stand elsewhere.
function styleOf(upper, lower, digit, elsewhere = "") {
  const others = table(elsewhere || "-:-");
  return (letter) => {
    if (Object.hasOwn(others, letter)) return others[letter];
    for (const [first, last, start] of [["A", "Z", upper], ["a", "z", lower], ["0", "9", digit]])
      if (start && letter >= first && letter <= last && letter.length === 1)
        return String.fromCodePoint(start + letter.charCodeAt(0) - first.charCodeAt(0));
    return letter;
  };
}

const bold = styleOf(0x1d400, 0x1d41a, 0x1d7ce), script = styleOf(0x1d49c, 0x1d4b6, 0,
  "B:ℬ E:ℰ F:ℱ H:ℋ I:ℐ L:ℒ M:ℳ R:ℛ e:ℯ g:ℊ o:ℴ");
const plain = (letter) => letter;
export const STYLES = {
  mathrm: plain, mathnormal: plain, mathbf: bold, boldsymbol: bold, bm: bold, mathcal: script,
  mathscr: script, mathbb: styleOf(0x1d538, 0x1d552, 0x1d7d8, "C:ℂ H:ℍ N:ℕ P:ℙ Q:ℚ R:ℝ Z:ℤ"),
  mathfrak: styleOf(0x1d504, 0x1d51e, 0, "C:ℭ H:ℌ I:ℑ R:ℜ Z:ℨ"),
  mathsf: styleOf(0x1d5a0, 0x1d5ba, 0x1d7e2), mathtt: styleOf(0x1d670, 0x1d68a, 0x1d7f6),
  mathit: styleOf(0x1d434, 0x1d44e, 0, "h:ℎ"),
};
