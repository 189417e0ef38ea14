#!/bin/sh
# Build llama.cpp's server, quantizer and benchmark into $1/bin, from the sources in the sdist of llama-cpp-python, which is
# pinned by its hash in llamacpp.source.txt, and keep its converter in $1/converter. Usage: llamacpp.sh DIRECTORY, an
# environment with cmake.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
environment=$(cd "$1" && pwd)
cores=$(nproc)
echo "llama.cpp: 220 files to compile, 11 minutes of one core, 6 to 8 on two; $cores here"
command -v g++ >/dev/null || { echo "llama.cpp needs g++ (Debian: apt-get install g++)" >&2; exit 1; }
work="$environment/sources"
mkdir -p "$work"
"$environment/bin/python" -m pip --disable-pip-version-check download --quiet --no-deps --no-binary :all: \
    --require-hashes -r "$here/llamacpp.source.txt" --dest "$work"
tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
# A server without TLS and web page; ccache is used where it is installed.
"$environment/bin/cmake" -S "$work"/llama_cpp_python-*/vendor/llama.cpp -B "$work/build" -G "Unix Makefiles" \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF > "$work/cmake.log"
"$environment/bin/cmake" --build "$work/build" --parallel "$cores" --target llama-server llama-quantize llama-bench
cp "$work"/build/bin/llama-server "$work"/build/bin/llama-quantize "$work"/build/bin/llama-bench "$environment/bin/"
mkdir -p "$environment/converter"
for part in convert_hf_to_gguf.py conversion gguf-py; do
    cp -r "$work"/llama_cpp_python-*/vendor/llama.cpp/$part "$environment/converter/"
done
rm -rf "$work"
