import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;

/** JDK's own client as LangChain4j and Spring AI use it: each request wishes for h2c. */
class Client {
    static final HttpClient CLIENT = HttpClient.newHttpClient();
    static final String BODY = "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"stream\": ";

    static HttpRequest.Builder request(String url, BodyPublisher body) {
        return HttpRequest.newBuilder(URI.create(url)).header("Content-Type", "application/json").POST(body);
    }

    static void print(String name, HttpRequest.Builder request) throws Exception {
        var answer = CLIENT.send(request.build(), BodyHandlers.ofString());
        System.out.println(name + "\t" + answer.statusCode() + "\t" + answer.body().replace("\n", " "));
    }

    public static void main(String[] args) throws Exception {
        String url = args[0] + "/v1/chat/completions";
        String whole = BODY + "false}";
        print("known length", request(url, BodyPublishers.ofString(whole)));
        print("chunks", request(url, BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(whole.getBytes()))));
        print("stream", request(url, BodyPublishers.ofString(BODY + "true}")));
        print("large", request(url, BodyPublishers.ofString(whole + " ".repeat(1000000))));
        print("get", HttpRequest.newBuilder(URI.create(args[0] + "/v1/models")));
        print("expects", request(url, BodyPublishers.ofString(whole)).expectContinue(true));
    }
}
