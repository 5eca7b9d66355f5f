"""llama.cpp's options that this program does not have, and what to use instead.

Source of the names: llama.cpp's common/arg.cpp and tools/llama-bench. A command's own option comes
first, so an entry has no effect where the option exists.
"""

import difflib

LORA = "adapters (LoRA) and control vectors are not here: merge the adapter into the GGUF file"
VISION = "pictures, sound and video are not here: this program reads text"
EMBEDDING = "embeddings and reranking are not here: this program writes text"
PLACEMENT = (
    "parts of a model cannot be placed by hand: --kv and --gpu-weights choose the GPU's part"
)
CORES = "threads are placed by the system: -t says how many, taskset on which cores"
LOG = "there is no log: -v says more, 2>FILE keeps the remarks"
DRAFT = "drafts are set by --speculate, --draft-model and --draft-method"
MIROSTAT = "this sampler is not here: use --temp, --top-p or --min-p"
CHECKPOINTS = "see --checkpoints"
THINK = "use --think on, --think off or --think-budget N"
TLS = "the server speaks plain HTTP: put a proxy with TLS before it"
ONE_KEY = "use --api-key, or SPARSEKV_API_KEY in the environment"
AUDIO = "this program writes no speech"
UNIFIED = "all sequences share one pool of memory already"
SLOTS = "the server keeps the rows of prompts in memory and on disk: see --cache-dir"
PAGE = "the page has no such setting"
REPOSITORY = "name the model as -m OWNER/REPO:QUANT"

# Names of one option, with spaces between -> what to use instead.
TABLE = {
    "--lora --lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled "
    "--control-vector-layer-range": LORA,
    "--mmproj -mm --mmproj-url -mmu --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload "
    "--no-mmproj-offload -mmdev --mmproj-device --image --audio --video --image-min-tokens "
    "--image-max-tokens --media-path --video-fps": VISION,
    "--embedding --embeddings -embd --pooling --embd-normalize --embd-output-format "
    "--embd-separator --rerank --reranking --attention": EMBEDDING,
    "-ot --override-tensor -otd -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn "
    "--n-cpu-ffn --moe-cache-mib --moe-cache -dev -devd --list-devices "
    "-fit --fit -fitt --fit-target -fitc --fit-ctx --op-offload --no-op-offload -nopo "
    "--no-host": PLACEMENT,
    "--rpc -rpc": "other machines are used by --ray (docs/distributed.md)",
    "-C --cpu-mask -Cr --cpu-range --cpu-strict --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch "
    "--cpu-strict-batch --prio-batch --poll-batch --threads-http": CORES,
    "--log-file --log-colors --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps "
    "--log-jsonl -lv --verbosity --log-verbosity --log-verbose --verbose-prompt "
    "--progress": LOG,
    "--draft --draft-n --draft-max --draft-min --draft-p-min --draft-n-min -ngld -cd "
    "--ctx-size-draft -ctkd --cache-type-k-draft -ctvd --cache-type-v-draft -td --threads-draft "
    "-hfd -hfrd --hf-repo-draft -lcs -lcd --lookup-cache-static --lookup-cache-dynamic "
    "--spec-type --spec-default --spec-draft-model": DRAFT,
    "--mirostat --mirostat-lr --mirostat-ent --adaptive-target --adaptive-decay --sampler-seq "
    "--sampling-seq -bs --backend-sampling": MIROSTAT,
    "-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step --swa-full": CHECKPOINTS,
    "-rea --reasoning --reasoning-budget --reasoning-budget-message --reasoning-effort "
    "--reasoning-format --reasoning-preserve --chat-template-kwargs": THINK,
    "--ssl-key-file --ssl-cert-file": TLS,
    "--api-key-file": ONE_KEY,
    "-mv --model-vocoder -hfv -hfrv --hf-repo-v -hffv --hf-file-v --tts-use-guide-tokens": AUDIO,
    "-kvu --kv-unified -no-kvu --no-kv-unified --kv-unified-per-slot -nocb "
    "--no-cont-batching": UNIFIED,
    "--slots --no-slots --slot-save-path --cache-ram -cram --cache-prompt --no-cache-prompt "
    "--cache-reuse --slot-prompt-similarity -sps --cache-idle-slots": SLOTS,
    "--ui --webui --no-ui --no-webui --ui-config --webui-config --path --public": PAGE,
    "--tools --mcp-servers-config --mcp-servers-json -ag --agent": "the program runs no tools; it "
    "returns the calls to the client",
    "-mu --model-url -dr --docker-repo -hff --hf-file": REPOSITORY,
    "-hft --hf-token": "put the token into HF_TOKEN, or use `hf auth login`",
    "-cl --cache-list": "'sparsekv-cli models' lists the models",
    "--models-dir": "the models folder is in SPARSEKV_MODELS",
    "--models-max --models-preset --models-autoload": "name each model with -m; docs/serve.md",
    "--prompt-cache --prompt-cache-all --prompt-cache-ro": "use --session FILE, or --cache-dir DIR",
    "-sysf --system-prompt-file": 'use -sys "$(cat FILE)"',
    "-bf --binary-file": "use -f FILE",
    "--in-file": "use -f FILE; it may be given several times",
    "--max-tokens --max-new-tokens --num-predict": "use -n N",
    "--num-ctx --max-model-len": "use -c N",
    "--stop-sequence --stop-sequences": "use -r TEXT",
    "--in-prefix --in-suffix --in-prefix-bos -mli --multiline-input -if "
    "--interactive-first": "the chat template marks the turns: --chat-template FILE takes another",
    "--alias -a": "a model has the name of its file: rename the file, or link to it",
    "--grp-attn-n -gan --grp-attn-w -gaw": "self-extend is not here: --rope-scaling yarn "
    "--rope-scale N stretches the context",
    "-dt --defrag-thold": "the cache has no gaps to close",
    "--perf": "the line about speed goes to stderr",
    "-lm --load-mode -lzm --lazy-mode -dio --direct-io -ndio --no-direct-io -nr": "the file is "
    "mapped; --repack on makes a copy in a faster layout",
    "-oe --output-err -o --output": "bench has -O md, json, jsonl or csv, on stdout",
    "--delay --n-gen-warmup": "bench has -r N and --no-warmup",
    "--license": "see the file LICENSE",
    "--completion-bash": "use 'sparsekv-cli completion bash'",
    "--ppl-stride --hellaswag --winogrande --multiple-choice --kl-divergence --all-logits": "see "
    "'sparsekv-cli eval --help'",
    "--escape-prompt": "texts are taken as they are",
}  # fmt: skip
ELSEWHERE = {name: text for names, text in TABLE.items() for name in names.split()}
ALIKE = 0.8  # least likeness (difflib's ratio) of an option to suggest


def unknown_option(name: str, known: list[str]) -> str:
    """Returns the error line for an option that a command does not have. known: its options."""
    if name in ELSEWHERE:
        return f"No option {name} here: {ELSEWHERE[name]}."
    close = difflib.get_close_matches(name, known, 1, ALIKE) if len(name) > 3 else []
    return f"No such option {name!r}{f' (did you mean {close[0]}?)' if close else ''}."
