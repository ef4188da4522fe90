# Completion of ringattn for bash: commands, the options of a command, and their fixed values.
# The option names come from `ringattn COMMAND --help`, so they cannot go stale.
_ringattn() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    local words=''
    case $previous in
    --layout | -l) words='contiguous zigzag balanced uneven runs:' ;;
    --dtype | -d) words='file f32 bf16 f16' ;;
    --out-dtype) words='f32 bf16 f16' ;;
    --backend) words='cpu cuda auto' ;;
    --transport) words='threads mpi nccl' ;;
    --vision) words='none within_window over_window' ;;
    --cpu-level) words='portable avx2 avx512 avx512bf16 amxbf16' ;;
    --ranks | -n | --threads | -t | --timeout | --seq | -s | --window | -w | --heads | --head-dim | \
        --images | --only)
        return
        ;;
    --out | -o | --trace | --docs) ;;
    *)
        if [ "$COMP_CWORD" = 1 ]; then
            words='check run plan bench --help --version'
        elif [[ $current == -* ]]; then
            words=$(ringattn "${COMP_WORDS[1]}" --help 2>/dev/null | grep -o -- '--[a-z-]*')
        fi
        ;;
    esac
    if [ -n "$words" ]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
        compopt -o filenames 2>/dev/null
    fi
}
complete -F _ringattn ringattn
